# SPDX-License-Identifier: Apache-2.0
"""Which channels a communicator has, and where each lies: arithmetic that needs no device.

All channels are made at init within ``max_bytes``: for each of the user's channels, and each of its lanes (eager, and
captured where the target has graphs), one for barriers and one for every size class; one for counted signals; and one
for each kernel channel. The rest of the memory, one part in :data:`USER_SHARE`, is the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from flycomm.channel import BUFFERS, SEGMENT_ALIGN, STATE_BYTES, USER_CHANNELS, segment_bytes, sent_offset
from flycomm.errors import UsageError
from flycomm.geometry import LARGEST_CLASS, SMALLEST_CLASS, SYNC, Geometry, entry, geometry, size_class

USER_SHARE = 8  # one part in so many of max_bytes is the user's own symmetric buffer


@dataclass(frozen=True)
class Key:
    """What owns a channel: a lane (a user's channel number, eager or captured), a protocol and a size class."""

    number: int
    captured: bool
    protocol: str  # "flags" | "packets" | "sentinel" | "barrier" | "signals" | "kernel:<name>"
    class_bytes: int = 0  # 0: no data


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
    """Every channel's place. Pure arithmetic: ``doctor`` prints it without a device."""

    slots: tuple[Slot, ...]
    largest_class: int
    user_offset: int
    user_bytes: int
    num_bytes: int
    state_bytes: int


def plan_layout(
    target: str,
    world: int,
    max_bytes: int,
    channels: int,
    graphs: bool,
    kernel_channels: dict[str, tuple[int, int]] | None = None,
    protocol: str = "auto",
    fits: Callable[[Geometry], bool] | None = None,
) -> Layout:
    """The largest set of size classes whose channels fit ``max_bytes``; raises :class:`UsageError` if none does.

    ``fits`` says of a grid whether it stays resident together with all that may wait at the same time (None: any).
    """
    largest = LARGEST_CLASS
    while largest > SMALLEST_CLASS and fits and not fits(geometry(target, largest)):
        largest //= 2
    while largest >= SMALLEST_CLASS:
        layout = _lay_out(
            target, world, max_bytes, _keys(target, channels, graphs, largest, kernel_channels or {}, protocol), largest
        )
        if layout.num_bytes <= max_bytes:
            return layout
        largest //= 2
    raise UsageError(
        f"max_bytes={max_bytes} is too small for {channels} channel(s) of {world} ranks: the smallest set needs "
        f"{layout.num_bytes} bytes; pass at least that"
    )


def _lay_out(target: str, world: int, max_bytes: int, keys: Iterable[tuple[Key, int]], largest: int) -> Layout:
    user_bytes = max_bytes // USER_SHARE // SEGMENT_ALIGN * SEGMENT_ALIGN
    slots: list[Slot] = []
    offset = user_bytes
    state = 0
    for key, own_blocks in keys:
        blocks = own_blocks or geometry(target, key.class_bytes).blocks
        rows = USER_CHANNELS if key.protocol == "signals" else blocks
        capacity = key.class_bytes * (2 if key.protocol == "packets" else 1)
        size = segment_bytes(rows, world, capacity, BUFFERS.get(key.protocol, 2))
        slots.append(Slot(key, len(slots), blocks, capacity, rows, offset, size, state))
        offset += size
        state += sent_offset(USER_CHANNELS, 0) if key.protocol == "signals" else blocks * STATE_BYTES
        state = -(-state // 128) * 128
    return Layout(tuple(slots), largest, 0, user_bytes, offset, state)


def _keys(
    target: str,
    channels: int,
    graphs: bool,
    largest: int,
    kernel_channels: dict[str, tuple[int, int]],
    protocol: str,
) -> Iterator[tuple[Key, int]]:
    """Every channel, and its blocks where its size class does not say them."""
    yield Key(0, False, "signals"), SYNC.blocks
    for name, (blocks, num_bytes) in kernel_channels.items():
        yield Key(0, False, f"kernel:{name}", size_class(num_bytes)), blocks
    for number in range(channels):
        for captured in (False, True) if graphs else (False,):
            yield Key(number, captured, "barrier"), SYNC.blocks
            class_bytes = SMALLEST_CLASS
            while class_bytes <= largest:
                chosen = entry(target, class_bytes).protocol if protocol == "auto" else protocol
                yield Key(number, captured, chosen, class_bytes), 0
                class_bytes *= 2
