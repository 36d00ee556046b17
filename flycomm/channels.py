# SPDX-License-Identifier: Apache-2.0
"""The channels of a communicator: made once, together, within ``max_bytes`` of peer-mapped memory."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flycomm.channel import (
    MAX_WORLD,
    RECORD_BYTES,
    SEGMENT_ALIGN,
    SIGNAL_BYTES,
    SIGNALS,
    STATE_BYTES,
    USER_CHANNELS,
    Record,
    segment_bytes,
    sent_offset,
)
from flycomm.errors import TimeoutRecord, UsageError
from flycomm.geometry import LARGEST_CLASS, SMALLEST_CLASS, SYNC, geometry, size_class
from flycomm.memory import SymmetricBuffer
from flycomm.primitives import peers_type
from flycomm.targets import Target
from flycomm.world import World

USER_SHARE = 8  # one part in so many of max_bytes is the user's own symmetric buffer


@dataclass(frozen=True)
class Key:
    """What owns a channel: a lane (a user's channel number, eager or captured), a protocol and a size class."""

    number: int
    captured: bool
    protocol: str  # "flags" | "barrier" | "signals" | "kernel:<name>"
    class_bytes: int = 0  # 0: no data


@dataclass(frozen=True)
class Slot:
    """Where a channel lies: offsets in the symmetric buffer, in the state and in the records."""

    key: Key
    index: int
    blocks: int
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
) -> Layout:
    """The largest set of size classes whose channels fit ``max_bytes``; raises :class:`UsageError` if none does."""
    largest = LARGEST_CLASS
    while largest >= SMALLEST_CLASS:
        layout = _lay_out(target, world, max_bytes, _keys(channels, graphs, largest, kernel_channels or {}), largest)
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
        size = segment_bytes(rows, world, key.class_bytes)
        slots.append(Slot(key, len(slots), blocks, rows, offset, size, state))
        offset += size
        state += sent_offset(USER_CHANNELS, 0) if key.protocol == "signals" else blocks * STATE_BYTES
        state = -(-state // 128) * 128
    return Layout(tuple(slots), largest, 0, user_bytes, offset, state)


def _keys(
    channels: int, graphs: bool, largest: int, kernel_channels: dict[str, tuple[int, int]]
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
                yield Key(number, captured, "flags", class_bytes), 0
                class_bytes *= 2


class Channels:
    """Memory, state and records of all channels, and the kernel argument of each. Making and closing are collective."""

    def __init__(self, world: World, target: Target, layout: Layout, limit_ticks: int):
        self.world = world
        self.target = target
        self.layout = layout
        self._device = torch.device(target.runtime.torch_device_type, world.device)
        if self._device.type == "cpu":
            self._device = torch.device("cpu")
        self.state = torch.zeros(layout.state_bytes, dtype=torch.uint8, device=self._device)
        target.runtime.synchronize(world.device)
        self.buffer = SymmetricBuffer(world, target, layout.num_bytes, name="channels")
        self._mapped = target.memory.allocate_mapped(RECORD_BYTES * len(layout.slots), world.device)
        self._words = (ctypes.c_uint32 * (self._mapped.num_bytes // 4)).from_address(self._mapped.host_address)
        self._valid = torch.frombuffer(self._words, dtype=torch.int32).view(-1, RECORD_BYTES // 4)[:, 0].numpy()
        self.peers = {slot.key: self._peers(slot, limit_ticks) for slot in layout.slots}

    def _peers(self, slot: Slot, limit_ticks: int) -> Any:
        rank, size = self.world.rank, self.world.size
        segments = {f"segment{j}": self.buffer.addresses[(rank + j) % size] + slot.offset for j in range(size)}
        return peers_type(size, slot.blocks)(
            world=size,
            blocks=slot.blocks,
            rank=rank,
            limit=limit_ticks,
            capacity=slot.key.class_bytes,
            state=self.state.data_ptr() + slot.state_offset,
            record=self._mapped.device_address + RECORD_BYTES * slot.index,
            **segments,
        )

    def segment(self, key: Key, rank: int) -> int:
        """Address, as this rank sees it, of rank ``rank``'s segment of a channel."""
        slot = next(slot for slot in self.layout.slots if slot.key == key)
        return self.buffer.addresses[rank] + slot.offset

    def user_address(self, rank: int) -> int:
        """Address, as this rank sees it, of rank ``rank``'s part of the user's symmetric buffer."""
        return self.buffer.addresses[rank] + self.layout.user_offset

    def failed(self) -> bool:
        """Whether some channel's block has given up. Reads host memory: no synchronisation."""
        return bool(self._valid.any())

    def failure(self) -> TimeoutRecord | None:
        """The record of the first failed channel, or None."""
        for slot in self.layout.slots:
            data = bytes(memoryview(self._words).cast("B")[RECORD_BYTES * slot.index : RECORD_BYTES * (slot.index + 1)])
            record = Record.parse(data)
            if record.valid:
                return record.explain(self.world.rank, slot.key.number)
        return None

    def reset(self, epoch: int = 0) -> None:
        """Own pads and staging to zero, own state and signal words to ``epoch``, records away.

        Not collective by itself: the caller makes sure that no rank has a kernel in flight, before and after.
        """
        device, memory = self.world.device, self.target.memory
        start, end = self.layout.user_offset + self.layout.user_bytes, self.layout.num_bytes
        memory.fill(self.buffer.local_address + start, 0, (end - start) // 4, device)
        state = torch.zeros(self.layout.state_bytes // 4, dtype=torch.int64)
        for slot in self.layout.slots:
            if epoch and slot.key.protocol != "signals":
                state[slot.state_offset // 4 : slot.state_offset // 4 + 4 * slot.blocks : 4] = epoch
                row = struct.pack("<Q", epoch) * (slot.signal_rows * MAX_WORLD)
                assert len(row) == slot.signal_rows * MAX_WORLD * SIGNAL_BYTES
                memory.write(self.buffer.local_address + slot.offset + SIGNALS, row, device)
        words = torch.where(state > 0x7FFFFFFF, state - (1 << 32), state).to(torch.int32)
        self.state.copy_(words.view(torch.uint8))
        self.target.runtime.synchronize(device)
        ctypes.memset(self._mapped.host_address, 0, self._mapped.num_bytes)

    def close(self) -> None:
        """Collective: drain, barrier, unmap, barrier, free."""
        self.buffer.close()
        self.target.memory.free_mapped(self._mapped, self.world.device)
        del self._valid, self._words
