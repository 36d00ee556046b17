# SPDX-License-Identifier: Apache-2.0
"""A schedule walked in a kernel is the one that Python prints."""

from functools import cache

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
import torch

from flycomm import targets
from flycomm.kernels import Specialization, compiled, null_pointer
from flycomm.primitives.access import store_element
from flycomm.primitives.schedule import ORDERS, deal, turns, walk
from tests.ranks import run

BLOCKS, THREADS, WORKERS = 3, 64, 4


@cache
def specialization(tiles, order):
    def build(world, dtype, blocks, threads):
        @flyc.kernel(known_block_size=[threads, 1, 1])
        def walked(out: fx.Pointer):
            worker = fx.Int32(fx.thread_idx.x) // fx.Int32(threads // WORKERS)
            place = (fx.Int32(fx.block_idx.x) * fx.Int32(WORKERS) + worker) * fx.Int32(turns(tiles, blocks, WORKERS))
            for turn, (tile, inside) in enumerate(walk(tiles, blocks, WORKERS, worker, order)):
                address = fx.Int64(fx.ptrtoint(out)) + fx.Int64(place + fx.Int32(turn)) * fx.Int64(4)
                store_element(address, inside.select(tile, fx.Int32(-1) - tile))

        @flyc.jit
        def launch(out: fx.Pointer, stream: fx.Stream):
            walked(out).launch(grid=(blocks,), block=(threads,), stream=stream)

        return launch, (null_pointer(fx.Int32, 4), fx.Stream(None))

    return Specialization(f"walk_{tiles}_{order}", build, 1, "", BLOCKS, THREADS)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tiles", [2, 12, 29])
def test_every_worker_walks_its_part_of_the_table(tiles, order):
    def body(comm):
        each = turns(tiles, BLOCKS, WORKERS)
        out = torch.full((BLOCKS, WORKERS, each), -7, dtype=torch.int32, device=comm.device)
        compiled(specialization(tiles, order))(out.data_ptr(), comm.stream())
        targets.active().runtime.synchronize(0)
        for block, wanted in enumerate(deal(tiles, BLOCKS, order)):
            padded = [*wanted, *[-1] * (WORKERS * each - len(wanted))]  # -1: outside, and the tile is 0
            assert out[block].T.flatten().tolist() == padded

    run(1, body)
