# SPDX-License-Identifier: Apache-2.0
"""Which warp runs on first: results do not depend on it, unless a block barrier is missing."""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
import torch

from flycomm import env
from tests.host.host_target import activate, at, store
from tests.ranks import rank_order_sum, run, same_bits, sample

pytestmark = pytest.mark.host_only

THREADS, WARP = 128, 32


@pytest.fixture(params=env.HOST_ORDERS)
def order(request):
    target = activate()
    target.set_order(request.param)
    yield request.param
    target.set_order(env.HOST_ORDER.get())


def _turn_around(with_barrier):
    """A launcher: threads give what threads of the opposite warp left, and leave another value."""

    @flyc.kernel(known_block_size=[THREADS, 1, 1])
    def kernel(output: fx.Int64):
        shared = fx.SharedAllocator().allocate(fx.Array[fx.Int32, THREADS]).peek()
        t = fx.Int32(fx.thread_idx.x)
        shared[t] = t
        fx.gpu.barrier()
        seen = shared[fx.Int32(THREADS - 1) - t]
        seen = fx.gpu.shuffle_xor(seen, 1, WARP)  # the lanes of a warp meet, warps do not
        if fx.const_expr(with_barrier):
            fx.gpu.barrier()
        shared[t] = fx.Int32(-1)
        store(output, t, seen)

    @flyc.jit
    def launch(output: fx.Int64):
        kernel(output).launch(grid=(1,), block=(THREADS,))

    return launch


@pytest.mark.parametrize("with_barrier", [True, False])
def test_a_missing_barrier_is_seen_where_warps_run_apart(order, with_barrier):
    output = torch.zeros(THREADS, dtype=torch.int32)
    _turn_around(with_barrier)(at(output))
    right = torch.equal(output, THREADS - 1 - (torch.arange(THREADS, dtype=torch.int32) ^ 1))
    assert right == (with_barrier or order == "fair")


@pytest.mark.parametrize("protocol", ["flags", "packets", "sentinel", "two_shot"])
def test_an_all_reduce_gives_the_same(order, protocol):
    def body(comm):
        for seed in range(3):
            x = sample(comm, (3001,), torch.bfloat16, seed)
            assert same_bits(comm.all_reduce(x), rank_order_sum(comm, x.shape, x.dtype, seed))

    run(3, body, protocol=protocol)
