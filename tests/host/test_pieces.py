# SPDX-License-Identifier: Apache-2.0
"""Messages in pieces, several calls of a channel in one kernel: one that fails in the middle ends all that follow it.

One rank launches alone. Its peer's signals are written by the host: as many as the peer should seem to have sent.
"""

from __future__ import annotations

import struct

import pytest
import torch

from flycomm.channel import SIGNAL_BYTES, signal_offset, staging_offset, state_offset
from flycomm.collectives import tag_of
from flycomm.errors import CommTimeout, UsageError
from flycomm.layout import key_of
from tests.ranks import rank_order_sum, run, same_bits, sample


def channel_of(comm, op="all_reduce"):
    """The key of the channel that the longest messages of ``op`` use, and where it lies."""
    row = comm._collectives._routes[op, False][-1]
    key = key_of(row, 0, False)
    return key, next(slot for slot in comm._session.channels.layout.slots if slot.key == key)


def signal_as_peer(comm, key, slot, epoch, tag):
    """As if rank 1 had come as far as ``epoch``, in every block."""
    segment = comm._session.channels.segment(key, 0)
    for block in range(slot.blocks):
        word = struct.pack("<II", epoch, tag)
        comm._session.target.memory.write(segment + signal_offset(block, 1), word, comm._session.world.device)


@pytest.mark.parametrize(("protocol", "piece"), [("flags", 1), ("two_shot", 2)])
def test_the_pieces_after_one_that_failed_write_nothing_to_peers(protocol, piece):
    """``piece``: calls and staging slots of one. The peer seems to have sent two signals, and sends no third."""

    def body(comm):
        session = comm._session
        memory, device = session.target.memory, session.world.device
        key, slot = channel_of(comm)
        per = slot.capacity // 4 * piece  # elements of a piece
        pieces = 5 // piece + 1
        x = torch.arange(1.0, pieces + 1, device=comm.device).repeat_interleave(per)[:-3]  # each its number
        comm.prepare([x.dtype], [x.numel() * 4])  # ranks of one process load kernels together
        if comm.rank == 0:
            signal_as_peer(comm, key, slot, 2, tag_of("all_reducesum", str(x.dtype), x.numel(), 0))
            out = comm.all_reduce(x)
            session.synchronize()
            done = 2 // piece * per  # where piece by piece two calls have come
            assert not out[:done].isnan().any()
            assert out[done:].isnan().all()
            with pytest.raises(CommTimeout) as caught:
                comm.check()
            record = caught.value.record
            assert (record.reason, record.expected, record.seen) == ("timeout", 3, 2)
            state = session.channels.state.cpu().view(torch.int32)
            for block in range(slot.blocks):
                at = (slot.state_offset + state_offset(block)) // 4
                assert state[at : at + 2].tolist() == [0, 1], "poisoned, and not advanced"
        session.world.barrier()
        if comm.rank == 1:  # what rank 0 sent: three calls and no more
            segment = session.channels.segment(key, 1)
            for block in range(slot.blocks):
                word = memory.read(segment + signal_offset(block, 0), SIGNAL_BYTES, device)
                assert struct.unpack("<II", word)[0] == 3
            assert memory.read(segment, 8, device) != bytes(8), "abort"
            for buffer, number in enumerate((2, 3) if piece == 1 else (1, 2)):
                offset = staging_offset(slot.blocks, 2, slot.capacity, buffer, 0)
                sent = memory.read(segment + offset, slot.capacity, device)
                assert sent == struct.pack("<f", number) * (slot.capacity // 4)
                memory.write(segment + offset, bytes(slot.capacity), device)
        session.world.barrier()
        comm.recover()
        for seed in range(2):
            want = rank_order_sum(comm, (3 * per,), torch.float32, seed)
            assert same_bits(comm.all_reduce(sample(comm, (3 * per,), torch.float32, seed)), want)

    run(2, body, timeout=0.3, protocol=protocol, max_bytes=1 << 20)


def test_what_a_kernel_cannot_count_is_refused():
    """A count is an i32, and wraps without a word: 2**32 elements would be none."""
    most = 2**31 - 16

    def body(comm):
        comm._collectives._max_bytes = 1 << 40
        for op, dtype, unit in (
            ("all_reduce", torch.float16, 2),
            ("all_reduce", torch.float32, 4),
            ("reduce_scatter", torch.bfloat16, 2),
            ("all_gather", torch.int64, 1),
        ):
            assert comm.plan(op, dtype, most * unit).row is not None
            assert comm.plan(op, dtype, (most + 1) * unit).reason == (
                f"{most + 1} elements are over the {most} of a launch; split the tensor"
            )
        x = torch.empty(most + 1, dtype=torch.float16, device="meta")
        with pytest.raises(UsageError, match=f"{most + 1} elements are over the {most} of a launch; reduce parts"):
            comm._collectives._make_symmetric(x, (0,), "sum", False, 0, False)

    run(1, body)
