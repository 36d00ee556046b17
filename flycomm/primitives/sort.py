# SPDX-License-Identifier: Apache-2.0
"""Sorting u64 ranks in shared memory by a block, greatest first; 0 serves as padding.

Many are spread over bins (:mod:`flycomm.primitives.spread`). Few, or those of which one bin would get too many, take a
bitonic sort (Batcher): steps over the lowest five bits of an index are shuffles
(:mod:`flycomm.primitives.select_group`), several of them for each time that an element is read; the others exchange
through shared memory.
"""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives.block_scan import GROUP, Scratch, read, write
from flycomm.primitives.score_row import fold_ranks
from flycomm.primitives.select_group import lane_steps, sorted_runs
from flycomm.primitives.spread import load_rank, spread

_MANY = 256


@flyc.jit
def _lanes(ranks: Any, count: int, size: int, threads: int) -> None:
    i = fx.Int32(fx.thread_idx.x)
    while i < fx.Int32(count):
        rank = read(ranks, i, fx.Uint64)
        if fx.const_expr(size == GROUP):
            rank = sorted_runs(rank, i)
        else:
            rank = lane_steps(rank, i, size, GROUP // 2)
        write(ranks, i, rank)
        i = i + fx.Int32(threads)
    fx.gpu.barrier()


@flyc.jit
def _far(ranks: Any, count: int, size: int, distance: int, threads: int) -> None:
    pair = fx.Int32(fx.thread_idx.x)
    while pair < fx.Int32(count // 2):
        i = (pair // fx.Int32(distance)) * fx.Int32(2 * distance) + pair % fx.Int32(distance)
        left, right = read(ranks, i, fx.Uint64), read(ranks, i + fx.Int32(distance), fx.Uint64)
        keep = (left > right) == ((i & fx.Int32(size)) == fx.Int32(0))
        write(ranks, i, keep.select(left, right))
        write(ranks, i + fx.Int32(distance), keep.select(right, left))
        pair = pair + fx.Int32(threads)
    fx.gpu.barrier()


def _bitonic(ranks: Any, count: int, threads: int) -> None:
    _lanes(ranks, count, GROUP, threads)
    size = 2 * GROUP
    while size <= count:
        distance = size // 2
        while distance >= GROUP:
            _far(ranks, count, size, distance, threads)
            distance //= 2
        _lanes(ranks, count, size, threads)
        size *= 2


@flyc.jit
def sort_block(ranks: Any, count: int, index_bits: int, scratch: Scratch, threads: int) -> None:
    """Sort ``count`` ranks (a power of two, at least 64) in shared memory, in place.

    Those that are not 0 differ, and are at least ``2**index_bits``. Every thread of the block calls it, after a block
    barrier that follows the writes; it ends with one. Clears the histogram, as for a refinement.
    """
    if fx.const_expr(count < _MANY):
        _bitonic(ranks, count, threads)
    else:
        first, floor = fx.Int32(fx.thread_idx.x), fx.Uint64(1 << index_bits)
        held = [load_rank(ranks, first + fx.Int32(j), fx.Int32(count)) for j in range(0, count, threads)]
        done, _ = spread(ranks, count, fold_ranks(held), floor, fx.Uint32(count), index_bits, scratch, threads)
        if done == fx.Boolean(False):
            _bitonic(ranks, count, threads)
