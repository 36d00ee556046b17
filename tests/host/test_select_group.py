# SPDX-License-Identifier: Apache-2.0
"""The best k of what a group of 32 lanes holds, in registers: to the bit, with ties, in warps of 32 and 64."""

from functools import cache

import flydsl.compiler as flyc
import flydsl.expr as fx
import numpy as np
import pytest
import torch

from flycomm import targets
from flycomm.kernels._launch import null_pointer
from flycomm.primitives.access import load_element, store_element
from flycomm.primitives.block_scan import GROUP
from flycomm.primitives.rank import element_of, ordered_key, rank_of
from flycomm.primitives.select_group import top_of_group
from tests import topk_oracle as oracle

THREADS, BITS = 128, 9
GROUPS = THREADS // GROUP


@cache
def kernel(each, k, low, warp):
    """Group ``g`` selects from row ``g``; every lane stores what it got, (groups, lanes, k). ``warp`` is a key."""

    @flyc.kernel(known_block_size=[THREADS, 1, 1])
    def top_of_groups(scores: fx.Pointer, ids: fx.Pointer, columns: fx.Int32):
        thread = fx.Int32(fx.thread_idx.x)
        group, lane = thread // fx.Int32(GROUP), thread % fx.Int32(GROUP)
        source, out = fx.Int64(fx.ptrtoint(scores)), fx.Int64(fx.ptrtoint(ids))
        ranks = []
        for i in fx.range_constexpr(each):
            index = lane + fx.Int32(GROUP * i)
            there = index < columns
            at = group * columns + there.select(index, fx.Int32(0))
            key = ordered_key(load_element(source + fx.Int64(at) * fx.Int64(4), fx.Uint32))
            ranks.append(there.select(rank_of(key, index, BITS, low), fx.Uint64(0)))
        best = top_of_group(ranks, k)
        for i in fx.range_constexpr(k):
            _, index = element_of(best[i], BITS, low)
            place = fx.Int64(thread * fx.Int32(k) + fx.Int32(i)) * fx.Int64(4)
            store_element(out + place, (best[i] != fx.Uint64(0)).select(index, fx.Int32(-1)))

    @flyc.jit
    def launch(scores: fx.Pointer, ids: fx.Pointer, columns: fx.Int32, stream: fx.Stream):
        top_of_groups(scores, ids, columns).launch(grid=(1,), block=(THREADS,), stream=stream)

    return flyc.compile(launch, null_pointer(fx.Float32, 4), null_pointer(fx.Int32, 4), 1, fx.Stream(None))


def check(scores, each, k, low=True, warp=0):
    target = targets.pick()
    targets.activate(target)
    device = torch.device(target.runtime.torch_device_type, 0)
    ids = torch.full((GROUPS, GROUP, k), 7, dtype=torch.int32, device=device)
    given = torch.from_numpy(scores).to(device)
    stream = target.runtime.current_stream(0)
    kernel(each, k, low, warp)(given.data_ptr(), ids.data_ptr(), scores.shape[1], stream)
    target.runtime.synchronize(0)
    _, want, _ = oracle.topk(scores, k, np.full(GROUPS, scores.shape[1]), "score", "low" if low else "high")
    for lane in range(GROUP):
        assert np.array_equal(ids[:, lane].cpu().numpy(), want), lane


@pytest.mark.parametrize(("each", "k", "columns"), [(1, 1, 32), (1, 8, 20), (2, 16, 64), (5, 3, 160), (8, 8, 256)])
def test_it_is_what_the_oracle_says(each, k, columns):
    for kind in oracle.KINDS:
        check(oracle.scores(kind, GROUPS, columns), each, k)


@pytest.mark.full
@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize("each", [1, 2, 3, 8, 11, 16])
@pytest.mark.parametrize("k", [1, 2, 5, 8, 13, 16])
def test_every_size(each, k, low):
    for columns in (32 * each, 32 * each - 17, 3):
        for kind in oracle.KINDS:
            check(oracle.scores(kind, GROUPS, columns), each, k, low)


@pytest.mark.host_only
@pytest.mark.parametrize("warp", [32, 64])
def test_ties_and_fewer_than_k_in_both_warps(warp, monkeypatch):
    monkeypatch.setenv("FLYCOMM_HOST_WARP", str(warp))
    for low in (True, False):
        check(np.zeros((GROUPS, 60), np.float32), 2, 6, low, warp)
        check(oracle.scores("levels", GROUPS, 60), 2, 6, low, warp)
        check(oracle.scores("normal", GROUPS, 4), 2, 6, low, warp)
