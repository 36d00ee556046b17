# SPDX-License-Identifier: Apache-2.0
"""Calls that depend on each other, back to back: a kernel that is there before the one ahead ends must not be too soon.

Two ranks on a GPU each start early; ranks that share a GPU do not, and pass too.
"""

from __future__ import annotations

import pytest
import torch

from tests.ranks import run

REPLAYS = 300


def _inputs(comm, size, turn):
    """Small integers, so that all sums are exact."""
    return (torch.arange(size, device=comm.device) % 101 + 3 * comm.rank + turn % 50).float()


def _chain(comm, x, side):
    """``(a, b)``: 2048 and 4096 times the sum over the ranks, b plus 2, by kernels each of which reads what the one
    ahead of it wrote, or writes what it read."""
    y = comm.all_reduce(x)
    for _ in range(5):
        y = comm.all_reduce(y)
    other = comm.all_reduce(y)  # × 64
    for _ in range(5):
        comm.all_reduce_(other)
    comm.all_reduce_(other, "max")  # by flags or packets, the same on all ranks
    half = other * 0.5  # a kernel of torch's
    copied = torch.empty_like(half).copy_(half)
    a = comm.all_reduce(copied)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        b = a + 1
    comm.all_reduce(copied, out=half)  # another write of what the copy has read, beside the other stream
    torch.cuda.current_stream().wait_stream(side)
    comm.all_reduce_(b)  # behind two kernels
    return a, b


def _wrong(comm, size, turn, found):
    total = sum(_inputs(comm, size, turn) + 3 * (rank - comm.rank) for rank in range(comm.world_size))
    a, b = found
    return (a != 2048 * total).sum() + (b != 4096 * total + 2).sum()


def _ready(comm, size):
    x, side = torch.zeros(size, device=comm.device), torch.cuda.Stream()
    comm.prepare([torch.float32], [4 * size])
    _wrong(comm, size, 0, _chain(comm, x, side))  # loads torch's kernels, and "max"
    torch.cuda.current_stream().synchronize()
    comm._session.world.barrier()
    return x, side


@pytest.mark.parametrize("size", [64, 3000, 32_000, 200_000])
def test_a_chain_of_calls(size):
    def body(comm):
        x, side = _ready(comm, size)
        wrong = torch.zeros((), dtype=torch.int64, device=comm.device)
        for turn in range(REPLAYS // 10):
            x.copy_(_inputs(comm, size, turn))
            wrong += _wrong(comm, size, turn, _chain(comm, x, side))
        torch.cuda.current_stream().synchronize()
        assert wrong.item() == 0
        comm.check()

    run(2, body, max_bytes=16 << 20)


@pytest.mark.parametrize("size", [64, 3000, 32_000, 200_000])
def test_a_chain_of_calls_in_a_graph(size):
    def body(comm):
        x, side = _ready(comm, size)
        graph = torch.cuda.CUDAGraph()
        for turn in range(comm.world_size):  # a capture is not a thing of one thread: one rank at a time
            if turn == comm.rank:
                stream = torch.cuda.current_stream()
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    found = _chain(comm, x, side)
                torch.cuda.synchronize()
            comm._session.world.barrier()
        wrong = torch.zeros((), dtype=torch.int64, device=comm.device)
        for turn in range(REPLAYS):
            x.copy_(_inputs(comm, size, turn))
            graph.replay()
            wrong += _wrong(comm, size, turn, found)
        torch.cuda.current_stream().synchronize()
        assert wrong.item() == 0
        comm.check()

    run(2, body, max_bytes=16 << 20)
