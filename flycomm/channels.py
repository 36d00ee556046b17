# SPDX-License-Identifier: Apache-2.0
"""The channels of a communicator: made once, together, within ``max_bytes`` of peer-mapped memory."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch

from flycomm.channel import (
    MAX_WORLD,
    RECORD_BYTES,
    SENTINEL,
    SIGNAL_BYTES,
    SIGNALS,
    Record,
    staging_base,
)
from flycomm.errors import TargetError, TimeoutRecord
from flycomm.layout import Key, Layout, Slot
from flycomm.memory import SymmetricBuffer
from flycomm.primitives import peers_type
from flycomm.targets import MappedMemory, Target
from flycomm.world import World


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
        self._mapped = self._ready()
        self._words = (ctypes.c_uint32 * (self._mapped.num_bytes // 4)).from_address(self._mapped.host_address)
        self._records = memoryview(self._words).cast("B")
        self._unused = bytes(len(self._records))
        self.peers = {slot.key: self._peers(slot, limit_ticks) for slot in layout.slots}

    def _ready(self) -> MappedMemory:
        """Mark what is unwritten and allocate the records. Nobody may write to a peer before all ranks have done so;
        a rank that cannot is told to all of them, and nothing is left behind."""
        mapped, problem = None, ""
        try:
            self._mark_unwritten()
            mapped = self.target.memory.allocate_mapped(RECORD_BYTES * len(self.layout.slots), self.world.device)
        except TargetError as error:
            problem = str(error)
        reasons = self.world.vote(mapped is not None, problem)
        if mapped is not None and not reasons:
            return mapped
        if mapped is not None:
            self.target.memory.free_mapped(mapped, self.world.device)
        self.buffer.close()
        raise TargetError(f"the channels cannot be made ready on all ranks: {'; '.join(reasons)}")

    def _peers(self, slot: Slot, limit_ticks: int) -> Any:
        rank, size = self.world.rank, self.world.size
        segments = {f"segment{j}": self.buffer.addresses[(rank + j) % size] + slot.offset for j in range(size)}
        return peers_type(size, slot.blocks)(
            world=size,
            blocks=slot.blocks,
            rank=rank,
            limit=limit_ticks,
            capacity=slot.capacity,
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
        """Whether a record may have been written. Reads host memory: no synchronisation."""
        return self._records.tobytes() != self._unused

    def failure(self) -> TimeoutRecord | None:
        """The record of the first failed channel, or None: one that a block has begun to write may not be valid yet."""
        for slot in self.layout.slots:
            record = Record.parse(bytes(self._records[RECORD_BYTES * slot.index : RECORD_BYTES * (slot.index + 1)]))
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
        self._mark_unwritten()
        state = torch.zeros(self.layout.state_bytes // 4, dtype=torch.int64)
        for slot in self.layout.slots:
            if epoch and slot.key.wire != "signals":
                epoch -= epoch % 6 if slot.key.wire == "sentinel" else 0  # all three buffers are clean
                state[slot.state_offset // 4 : slot.state_offset // 4 + 4 * slot.blocks : 4] = epoch
                row = struct.pack("<Q", epoch) * (slot.signal_rows * MAX_WORLD)
                assert len(row) == slot.signal_rows * MAX_WORLD * SIGNAL_BYTES
                memory.write(self.buffer.local_address + slot.offset + SIGNALS, row, device)
        words = torch.where(state > 0x7FFFFFFF, state - (1 << 32), state).to(torch.int32)
        self.state.copy_(words.view(torch.uint8))
        self.target.runtime.synchronize(device)
        ctypes.memset(self._mapped.host_address, 0, self._mapped.num_bytes)

    def _mark_unwritten(self) -> None:
        """Fill the own staging of sentinel channels, all buffers, with the sentinel."""
        for slot in self.layout.slots:
            if slot.key.wire == "sentinel":
                start = staging_base(slot.signal_rows)
                address, words = self.buffer.local_address + slot.offset + start, (slot.num_bytes - start) // 4
                self.target.memory.fill(address, SENTINEL, words, self.world.device)

    def abort(self) -> None:
        """Tell every peer's kernels to stop waiting for this rank: it has failed on the host."""
        word = struct.pack("<Q", 1)
        for slot in self.layout.slots:
            for rank, address in enumerate(self.buffer.addresses):
                if rank != self.world.rank:
                    self.target.memory.write(address + slot.offset, word, self.world.device)

    def close(self) -> None:
        """Collective: drain, barrier, unmap, barrier, free."""
        try:
            self.buffer.close()
        finally:  # also what cannot be unmapped: only kernels of this rank write to its records
            self.target.memory.free_mapped(self._mapped, self.world.device)
            del self._records, self._words
