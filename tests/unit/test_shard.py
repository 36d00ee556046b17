# SPDX-License-Identifier: Apache-2.0
"""Dealing keys out over ranks: every key has one place, in order, and local lengths add up."""

from __future__ import annotations

import itertools

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
import torch

from flycomm import targets
from flycomm.errors import UsageError
from flycomm.indexer.shard import ShardLayout
from flycomm.primitives.access import store_element
from flycomm.primitives.shard import global_of, local_length, local_of, rank_of_position

LAYOUTS = [ShardLayout(world, granule) for world, granule in itertools.product((1, 2, 3, 4, 8), (1, 5, 64, 128))]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_key_has_one_place(layout: ShardLayout):
    keys = 3 * layout.world * layout.granule + layout.granule + 3
    shares: list[list[int]] = [[] for _ in range(layout.world)]
    for position in range(keys):
        rank, local = layout.to_local(position)
        assert local == len(shares[rank]), "a rank keeps its keys in order"
        assert layout.to_global(local, rank) == position
        shares[rank].append(position)
    for length in range(keys + 1):
        counts = [layout.local_length(length, rank) for rank in range(layout.world)]
        assert counts == [sum(position < length for position in share) for share in shares]
    assert layout.end(max(map(len, shares))) >= keys


def test_contiguous_is_one_run_a_rank():
    layout = ShardLayout.contiguous(3, 10)
    assert [layout.to_local(position) for position in (0, 9, 10, 29)] == [(0, 0), (0, 9), (1, 0), (2, 9)]
    assert [layout.local_length(12, rank) for rank in range(3)] == [10, 2, 0]
    assert (layout.end(10), layout.end(0)) == (30, 0)


@pytest.mark.parametrize(("world", "granule"), [(0, 1), (2, 0)])
def test_an_empty_layout_is_refused(world: int, granule: int):
    with pytest.raises(UsageError, match="at least 1"):
        ShardLayout(world, granule)


@pytest.mark.host_only
def test_kernels_compute_the_same():
    targets.activate(targets.get("host"))
    world, granule, threads = 3, 5, 64

    @flyc.kernel(known_block_size=[threads, 1, 1])
    def places(out: fx.Int64, given: fx.Int32):
        i = fx.Int32(fx.thread_idx.x)
        for rank in fx.range_constexpr(world):
            values = (
                global_of(i, fx.Int32(rank), fx.Int32(world), given),
                rank_of_position(i, fx.Int32(world), given),
                local_of(i, world, given),
                local_length(i, fx.Int32(rank), fx.Int32(world), given),
            )
            for n, value in enumerate(values):
                place = (i * fx.Int32(world) + fx.Int32(rank)) * fx.Int32(len(values)) + fx.Int32(n)
                store_element(out + fx.Int64(place) * fx.Int64(4), value)

    @flyc.jit
    def launch(out: fx.Int64, given: fx.Int32, stream: fx.Stream):
        places(out, given).launch(grid=(1,), block=(threads,), stream=stream)

    out = torch.zeros(threads, world, 4, dtype=torch.int32)
    launch(fx.Int64(out.data_ptr()), granule, fx.Stream(None))
    layout = ShardLayout(world, granule)
    for i, rank in itertools.product(range(threads), range(world)):
        want = [layout.to_global(i, rank), *layout.to_local(i), layout.local_length(i, rank)]
        assert out[i, rank].tolist() == want


def test_a_round_that_32_bits_do_not_hold_is_refused():
    ShardLayout(2, 2**30 - 1)
    with pytest.raises(UsageError, match=r"8 ranks by 1073741824 keys are over 2147483647"):
        ShardLayout(8, 2**30)
