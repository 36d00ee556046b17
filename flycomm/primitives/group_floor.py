# SPDX-License-Identifier: Apache-2.0
"""A first bound for a selection, from the greatest elements of groups of lanes: many are ruled out at little cost."""

from collections.abc import Sequence
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives.block_scan import GROUP, Scratch, read, write
from flycomm.primitives.norm import fold


def greatest(ranks: Sequence[Any]) -> Any:
    """The greatest (u64) of this thread's ``ranks``."""
    return fold(ranks, fx.arith.max)


def _greatest_key(ranks: Sequence[Any], index_bits: int, distances: Sequence[int]) -> Any:
    key = fold([fx.Uint32(rank >> fx.Uint64(index_bits)) for rank in ranks], fx.arith.max)
    for distance in distances:
        key = fx.arith.max(key, fx.Uint32(fx.gpu.shuffle_xor(key, distance, GROUP)))
    return key


@flyc.jit
def group_floor(ranks: Any, need: Any, index_bits: int, scratch: Scratch, threads: int) -> Any:
    """A rank (u64) that at least ``need`` (u32) of the block's elements are not below; usually not many more are.

    The key of the ``need``-th of the groups' greatest elements; with fewer groups than that, what all elements reach.
    ``ranks``: this thread's, in registers. Costs two block barriers and no look at other threads' elements.
    """
    groups = threads // GROUP
    thread = fx.Int32(fx.thread_idx.x)
    key = _greatest_key(ranks, index_bits, (16, 8, 4, 2, 1))
    totals, found = scratch.totals, scratch.found
    if thread % fx.Int32(GROUP) == fx.Int32(0):
        write(totals, thread // fx.Int32(GROUP), key)
    fx.gpu.barrier()
    if thread < fx.Int32(groups):
        mine, greater, equal = read(totals, thread), fx.Uint32(0), fx.Uint32(0)
        for j in fx.range_constexpr(groups):  # no read waits for another, as the steps of a sort would
            other = read(totals, j)
            greater = greater + (other > mine).select(fx.Uint32(1), fx.Uint32(0))
            equal = equal + (other == mine).select(fx.Uint32(1), fx.Uint32(0))
        if (greater < need) & (need <= greater + equal):
            write(found, 0, mine)
    fx.gpu.barrier()
    enough = (need > fx.Uint32(0)) & (need <= fx.Uint32(groups))
    key = enough.select(read(found, 0), fx.Uint32(1))
    return fx.Uint64(fx.arith.max(key, fx.Uint32(1))) << fx.Uint64(index_bits)


@flyc.jit
def halves_floor(rank: Any, need: Any, index_bits: int, scratch: Scratch, threads: int) -> Any:
    """:func:`group_floor` by half groups, of which there are twice as many, with more elements that are not below it.

    The key of the last of their greatest elements. ``rank``: this thread's. Costs two block barriers.
    """
    half = GROUP // 2
    thread = fx.Int32(fx.thread_idx.x)
    lane = thread % fx.Int32(GROUP)
    key = _greatest_key([rank], index_bits, (8, 4, 2, 1))
    totals = scratch.totals
    if lane % fx.Int32(half) == fx.Int32(0):
        write(totals, thread // fx.Int32(half), key)
    fx.gpu.barrier()
    halves = threads // half
    last = fx.arith.min(*(read(totals, (lane + fx.Int32(first)) % fx.Int32(halves)) for first in (0, GROUP)))
    for distance in (16, 8, 4, 2, 1):
        last = fx.arith.min(last, fx.Uint32(fx.gpu.shuffle_xor(last, distance, GROUP)))
    fx.gpu.barrier()
    key = (need <= fx.Uint32(halves)).select(last, fx.Uint32(1))
    return fx.Uint64(fx.arith.max(key, fx.Uint32(1))) << fx.Uint64(index_bits)
