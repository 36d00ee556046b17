# SPDX-License-Identifier: Apache-2.0
"""Which channels a communicator has, and where each lies: arithmetic that needs no device.

All channels are made at init within ``max_bytes``: for each of the user's channels, and each of its lanes (eager, and
captured where the target has graphs), one for barriers and one for every wire, grid and capacity that the table's rows
ask for; one for counted signals; and one for each kernel channel. The rest of the memory, one part in
:data:`USER_SHARE`, is the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from flycomm.channel import BUFFERS, SEGMENT_ALIGN, STATE_BYTES, TRACE_BYTES, USER_CHANNELS, segment_bytes, sent_offset
from flycomm.errors import UsageError
from flycomm.geometry import SMALLEST_CLASS, SYNC, Geometry, size_class
from flycomm.tables import FUSED, LOOPING, OPS, Row, Table, carries, wire

USER_SHARE = 8  # one part in so many of max_bytes is the user's own symmetric buffer
_LARGEST_CAPACITY = 64 << 20  # bytes; where the search for what fits begins

Routes = dict[tuple[str, bool], tuple[Row, ...]]  # (op, captured) → rows that this communicator can use


@dataclass(frozen=True)
class Key:
    """What owns a channel: a lane (a user's channel number, eager or captured), a wire, a grid and a capacity.

    Calls of any operation that send alike on the same grid may share it: the map from staging slot to block and thread
    is the grid's, and every call sends to, and waits for, every peer.
    """

    number: int
    captured: bool
    wire: str  # "flags" | "packets" | "sentinel" | "barrier" | "signals" | "topk…" | "kernel:<name>"
    geometry: Geometry = SYNC
    capacity: int = 0  # bytes that a source has in staging at a time; 0: no data


@dataclass(frozen=True)
class Slot:
    """Where a channel lies: offsets in the symmetric buffer, in the state and in the records."""

    key: Key
    index: int
    blocks: int
    capacity: int  # bytes of a staging slot
    signal_rows: int  # rows of signal words: blocks, or user channels
    offset: int
    num_bytes: int
    state_offset: int


@dataclass(frozen=True)
class Layout:
    """Every channel's place, and the rows that use them. Pure arithmetic: ``doctor`` prints it without a device."""

    slots: tuple[Slot, ...]
    routes: Routes
    user_offset: int
    user_bytes: int
    num_bytes: int
    state_bytes: int


def key_of(row: Row, number: int, captured: bool) -> Key:
    """The channel that a row's calls use."""
    return Key(number, captured, wire(row.protocol), row.geometry, row.capacity)


def plan_layout(
    table: Table,
    world: int,
    max_bytes: int,
    channels: int,
    graphs: bool,
    kernel_channels: dict[str, tuple[int, int]] | None = None,
    protocol: str = "auto",
    fits: Callable[[Geometry], bool] | None = None,
    lane_channels: dict[str, tuple[Geometry, int]] | None = None,
) -> Layout:
    """The channels of the largest capacities that fit ``max_bytes``; raises :class:`UsageError` if none do.

    ``fits`` says of a grid whether it stays resident together with all that may wait at the same time (None: any).
    ``lane_channels``: further channels of every lane, wire → grid and bytes of a source.
    ``protocol``: for every size, wherever it can carry the operation ("auto": the table's).
    """
    capacity = _LARGEST_CAPACITY
    while capacity >= SMALLEST_CLASS:
        routes = _routes(table, world, graphs, capacity, protocol, fits)
        layout = _lay_out(world, max_bytes, _keys(channels, routes, kernel_channels or {}, lane_channels or {}), routes)
        if layout.num_bytes <= max_bytes:
            return layout
        capacity //= 2
    raise UsageError(
        f"max_bytes={max_bytes} is too small for {channels} channel(s) of {world} ranks: the smallest set needs "
        f"{layout.num_bytes} bytes; pass at least that"
    )


def _routes(
    table: Table,
    world: int,
    graphs: bool,
    capacity: int,
    protocol: str,
    fits: Callable[[Geometry], bool] | None,
) -> Routes:
    routes = {}
    for captured in (False, True) if graphs else (False,):
        for op in (*OPS, *FUSED):
            rows = [_forced(row, protocol) for row in table.of(op, world, captured)]
            fitting = [row for row in rows if fits is None or fits(row.counted)]
            if op in FUSED:
                routes[op, captured] = tuple(_fused(fitting, capacity))
            else:
                routes[op, captured] = _usable(fitting or rows[:1], capacity)
    return routes


def _forced(row: Row, protocol: str) -> Row:
    if protocol == "auto":
        return row
    return replace(row, protocol=protocol if carries(protocol, row.op, "sum") else "packets")


def _fused(fitting: list[Row], capacity: int) -> Iterator[Row]:
    """The rows with no capacity over ``capacity``; what loops elsewhere keeps sharing its channel, cut short."""
    for row in fitting:
        if row.protocol in LOOPING and row.largest is not None:
            least = min(row.capacity, capacity)
            yield replace(row, capacity=least, largest=min(row.largest, least))
        elif row.capacity <= capacity:
            yield row


def _usable(fitting: list[Row], capacity: int) -> tuple[Row, ...]:
    """The rows with no capacity over ``capacity``; the last takes all that is longer, in pieces."""
    kept = []
    for row in fitting:
        if row.protocol in LOOPING:
            kept.append(replace(row, capacity=min(row.capacity, capacity)))
        elif row.capacity <= capacity:
            kept.append(replace(row, largest=min(row.largest or row.capacity, row.capacity)))
    longest = fitting[-1]
    if longest.protocol not in LOOPING:
        kept.append(replace(longest, protocol="flags", capacity=min(longest.capacity, capacity)))
    return (*kept[:-1], replace(kept[-1], largest=None))


def _lay_out(world: int, max_bytes: int, keys: Iterable[Key], routes: Routes) -> Layout:
    user_bytes = max_bytes // USER_SHARE // SEGMENT_ALIGN * SEGMENT_ALIGN
    slots: list[Slot] = []
    offset = user_bytes
    state = 0
    for key in dict.fromkeys(keys):
        blocks = key.geometry.blocks
        rows = USER_CHANNELS if key.wire == "signals" else blocks
        capacity = key.capacity * (2 if key.wire == "packets" else 1)
        size = segment_bytes(rows, world, capacity, BUFFERS.get(key.wire, 2))
        state += TRACE_BYTES
        slots.append(Slot(key, len(slots), blocks, capacity, rows, offset, size, state))
        offset += size
        state += sent_offset(USER_CHANNELS, 0) if key.wire == "signals" else blocks * STATE_BYTES
        state = -(-state // 128) * 128
    return Layout(tuple(slots), routes, 0, user_bytes, offset, state)


def _keys(
    channels: int,
    routes: Routes,
    kernel_channels: dict[str, tuple[int, int]],
    lane_channels: dict[str, tuple[Geometry, int]],
) -> Iterator[Key]:
    yield Key(0, False, "signals")
    for name, (blocks, num_bytes) in kernel_channels.items():
        yield Key(0, False, f"kernel:{name}", Geometry(blocks, 0), size_class(num_bytes))
    for number in range(channels):
        for captured in dict.fromkeys(captured for _, captured in routes):
            yield Key(number, captured, "barrier")
            for name, (grid, num_bytes) in lane_channels.items():
                yield Key(number, captured, name, grid, num_bytes)
            for op in (*OPS, *FUSED):
                for row in routes[op, captured]:
                    yield key_of(row, number, captured)
