# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory that is reduced where it lies: what happens when a rank gives up, and when memory comes back."""

from __future__ import annotations

import struct
import time

import pytest
import torch

from flycomm.channel import signal_offset
from flycomm.collectives import tag_of
from flycomm.errors import CommTimeout
from flycomm.layout import key_of
from tests.ranks import run, same_bits, sample

SIZE = 2001  # elements; one piece in place


def load(comm, one, in_place):
    """The kernel, on all ranks: those of one process load it together, and one that does not come loads nothing."""
    comm._collectives._make_symmetric(one.tensor, one._rotated, "sum", in_place, 0, False)


def reduce(one, in_place):
    return one.all_reduce_() if in_place else one.all_reduce()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_late_rank_does_not_succeed_with_the_memory_of_one_that_gave_up(in_place):
    """Rank 0 signalled twice, gave up, and may have written its memory since. Its words are written by the host."""

    def body(comm):
        session = comm._session
        memory, device = session.target.memory, session.world.device
        row = comm._collectives._routes["all_reduce", False][-1]
        segment = session.channels.segment(key_of(row, 0, False), 1)
        one = comm.empty((SIZE,), torch.float32)
        load(comm, one, in_place)
        for gave_up in (False, True):
            one.tensor.fill_(comm.rank + 1.0)
            session.synchronize()
            session.world.barrier()
            if comm.rank == 1:
                word = struct.pack("<II", 2, tag_of(f"symmetric {in_place} sum", "torch.float32", SIZE, 0))
                for block in range(row.blocks):
                    memory.write(segment + signal_offset(block, 0), word, device)
                if gave_up:
                    memory.write(segment, struct.pack("<Q", 1), device)
                result = reduce(one, in_place)
                session.synchronize()
                if gave_up:
                    with pytest.raises(CommTimeout, match="abort"):
                        comm.check()
                    assert not in_place or bool((result == 2).all()), "a peer may still read it"
                else:
                    comm.check()
                    assert bool((result == 3).all())
            session.world.barrier()
            comm.recover()

    run(2, body, timeout=0.3)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_missing_rank_and_recover(in_place):
    def body(comm):
        one = comm.empty((3001,), torch.float32)
        load(comm, one, in_place)
        one.tensor.copy_(sample(comm, (3001,), torch.float32, 0))
        want = sum(sample(comm, (3001,), torch.float32, 0, rank) for rank in range(3))
        started = time.monotonic()
        if comm.rank != 1:
            result = reduce(one, in_place)
            comm._session.synchronize()
            assert time.monotonic() - started < 5.0
            if in_place:
                assert same_bits(result, sample(comm, (3001,), torch.float32, 0)), "a peer may still read it"
            else:
                assert result.isnan().all()
            with pytest.raises(CommTimeout):
                comm.check()
        comm._session.world.barrier()
        comm.recover()
        assert same_bits(reduce(one, in_place), want)

    run(3, body, timeout=0.3)


def test_memory_that_comes_back_is_another_tensor():
    def body(comm):
        one = comm.empty((64,), torch.float32)
        for part, dtype in ((one.tensor, torch.float32), (one.tensor[:20], torch.float32), (one.tensor, torch.float16)):
            x = part.view(dtype)
            x.copy_(torch.full(x.shape, comm.rank + 1.0))
            result = torch.zeros_like(x)
            comm._collectives.all_reduce_symmetric(x, one._rotated, "sum", result, False, 0)
            assert torch.equal(result, torch.full_like(x, 3.0)), (x.shape, dtype)

    run(2, body)
