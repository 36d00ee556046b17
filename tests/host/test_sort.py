# SPDX-License-Identifier: Apache-2.0
"""A block's sort, and the best of a block in order, to the bit: spread evenly, in few bins, in too few."""

from functools import cache

import flydsl.compiler as flyc
import flydsl.expr as fx
import numpy as np
import pytest
import torch

from flycomm import targets
from flycomm.kernels._launch import null_pointer
from flycomm.primitives.access import load_element, store_element
from flycomm.primitives.block_scan import Scratch, read, write
from flycomm.primitives.score_row import fold_ranks
from flycomm.primitives.sort import sort_block
from flycomm.primitives.spread import BIN_ROOM, spread

BITS = 20


def _element(address, i):
    return address + fx.Int64(i) * fx.Int64(8)


@cache
def kernel(count, room, threads):
    """Sorts ``count`` ranks in place (``room`` 0), or puts the best ``need`` of them into an array of ``room``.

    Twice, so that what the first leaves behind would show. Stores the array, then whether it was done and how many.
    """

    @flyc.kernel(known_block_size=[threads, 1, 1])
    def sorts(given: fx.Pointer, out: fx.Pointer, floor: fx.Int64, need: fx.Int32):
        thread = fx.Int32(fx.thread_idx.x)
        source, destination = fx.Int64(fx.ptrtoint(given)), fx.Int64(fx.ptrtoint(out))
        shared = fx.SharedAllocator()
        scratch = Scratch(shared)
        size = room or count
        ranks = shared.allocate(fx.Array[fx.Uint64, size]).peek().ptr
        at = [thread + fx.Int32(j) for j in range(0, count, threads)]
        for _ in fx.range_constexpr(2):
            held = [load_element(_element(source, i), fx.Uint64) for i in at]
            if fx.const_expr(room == 0):
                for i, rank in zip(at, held, strict=True):
                    write(ranks, i, rank)
                fx.gpu.barrier()
                sort_block(ranks, count, BITS, scratch, threads)
            else:
                fold, wanted = fold_ranks(held), fx.Uint32(need)
                done, total = spread(ranks, room, fold, fx.Uint64(floor), wanted, BITS, scratch, threads)
                if thread == fx.Int32(0):
                    store_element(_element(destination, size), fx.Uint64(done.select(fx.Uint32(1), fx.Uint32(0))))
                    store_element(_element(destination, size + 1), fx.Uint64(total))
            for i in [thread + fx.Int32(j) for j in range(0, size, threads)]:
                if i < fx.Int32(size):
                    store_element(_element(destination, i), read(ranks, i, fx.Uint64))
            fx.gpu.barrier()

    @flyc.jit
    def launch(given: fx.Pointer, out: fx.Pointer, floor: fx.Int64, need: fx.Int32, stream: fx.Stream):
        sorts(given, out, floor, need).launch(grid=(1,), block=(threads,), stream=stream)

    return flyc.compile(launch, null_pointer(fx.Uint64, 8), null_pointer(fx.Uint64, 8), 1, 1, fx.Stream(None))


def run(ranks, room=0, threads=64, floor=1 << BITS, need=0):
    target = targets.pick()
    targets.activate(target)
    device = torch.device(target.runtime.torch_device_type, 0)
    given = torch.from_numpy(ranks.view(np.int64)).to(device)
    out = torch.zeros((room or ranks.size) + 2, dtype=torch.int64, device=device)
    stream = target.runtime.current_stream(0)
    kernel(ranks.size, room, threads)(given.data_ptr(), out.data_ptr(), floor, need, stream)
    target.runtime.synchronize(0)
    found = out.cpu().numpy().view(np.uint64)
    return found[:-2], bool(found[-2]), int(found[-1])


def _rank(keys):
    """Ranks of ``keys``, in some order; 0 stays 0."""
    rng = np.random.default_rng(7)
    keys = np.asarray(keys, np.uint64)
    ids = rng.choice(1 << BITS, keys.size, replace=False).astype(np.uint64)
    return rng.permutation(np.where(keys > 0, (keys << np.uint64(BITS)) | ids, np.uint64(0)))


def keys(kind, count):
    rng = np.random.default_rng(count)
    if kind == "all":  # up to both ends
        return np.concatenate([[1, 0xFFFFFFFF], rng.integers(1, 1 << 32, count - 2)])
    if kind == "one key":  # ids alone part them
        return np.full(count, 0xBF800000)
    if kind == "levels":
        return rng.integers(3, 40, count) << 22
    if kind == "an outlier":  # all others in one bin
        return np.concatenate([[0xF0000000], rng.integers(1000, 2000, count - 1)])
    if kind == "few":
        return np.concatenate([np.zeros(count - 5), rng.integers(1, 1 << 32, 5)])
    return np.zeros(count)


KINDS = ("all", "one key", "levels", "an outlier", "few", "none")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("count", "threads"), [(256, 64), (256, 512), pytest.param(2048, 1024, marks=pytest.mark.full)]
)
def test_a_sort_is_a_sort(count, threads, kind):
    ranks = _rank(keys(kind, count))
    found, _, _ = run(ranks, threads=threads)
    assert np.array_equal(found, np.sort(ranks)[::-1])


def test_what_is_no_rank_stays_within_the_array():
    """Rows of other ranks, or behind a failed wait: any 64 bits."""
    ranks = np.random.default_rng(3).integers(0, 1 << 64, 512, dtype=np.uint64)
    found, _, _ = run(ranks)
    assert np.array_equal(np.sort(found), np.sort(ranks))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("need", [0, 1, 100, 192])
def test_the_best_in_order_and_nothing_behind(need, kind):
    ranks = _rank(keys(kind, 512))
    found, done, total = run(ranks, 192 + BIN_ROOM, need=need)
    falling = np.sort(ranks)[::-1]
    assert total == (ranks > 0).sum()
    assert done == (kind != "an outlier" or need < 2)
    if done:
        held = min(need, total)
        assert np.array_equal(found[:held], falling[:held])
        kept = int((found > 0).sum())
        assert np.array_equal(found[:kept], falling[:kept]), "what else was kept of a bin follows in order"
        assert kept < need + BIN_ROOM or need == 0 == kept


@pytest.mark.parametrize("need", [5, 64])
def test_what_is_below_the_floor_is_not_looked_at(need):
    ranks = _rank(keys("all", 512))
    falling = np.sort(ranks)[::-1]
    floor = int(falling[63])  # 64 reach it
    found, done, total = run(ranks, 192 + BIN_ROOM, floor=floor, need=need)
    assert done
    assert total == 64
    assert np.array_equal(found[:need], falling[:need])
    assert not (found[found > 0] < floor).any()


@pytest.mark.parametrize("kind", ["as many as a bin holds", "one more"])
def test_a_bin_that_is_full(kind):
    many = BIN_ROOM + (kind == "one more")
    ranks = _rank(np.concatenate([[0xF0000000], np.full(many, 5), np.zeros(511 - many)]))
    found, done, _ = run(ranks, 192 + BIN_ROOM, need=9)
    assert done == (kind != "one more")
    if done:
        assert np.array_equal(found[:9], np.sort(ranks)[::-1][:9])
