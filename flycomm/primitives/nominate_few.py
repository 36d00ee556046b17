# SPDX-License-Identifier: Apache-2.0
"""Up to 64 local best of a row whose scores the block has in registers: :mod:`~flycomm.primitives.nominate`, sooner.

An *element* is ``(key, index)``: a key (u32, 0 for none; :mod:`flycomm.primitives.rank`) and a local index (i32).
Selecting goes by keys, so a rank is made only of what is chosen. The block is cut into :data:`PARTS` runs of lanes; of
their greatest keys the ``need``-th is a floor that enough elements reach, and seldom many more: of 4096 scores in no
order and ``need`` 16, some 20. These gather in shared memory, in any order: three block barriers to there. Where
more than 64 reach the floor, a radix select looks at them again.
"""

from collections.abc import Sequence
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives.block_scan import GROUP, Scratch, clear, read, write
from flycomm.primitives.candidates import ID_BITS
from flycomm.primitives.rank import ordered_key, rank_of
from flycomm.primitives.score_row import ScoreRow, f32_bits
from flycomm.primitives.select import Fold, compact, places, refine

PARTS = 64  # of a block, which has a multiple of as many threads
ROOM = 2 * GROUP  # ranks
_GATHERED = 3  # place of a count in ``scratch.found``


def elements_of(row: ScoreRow, units: Sequence[Any], at: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Of loaded units, ``at[i]`` (i32) being the place of ``units[i]`` in the row."""
    found = []
    for unit, place in zip(units, at, strict=True):
        first = place * fx.Int32(row.per_unit)
        for e, bits in enumerate(f32_bits(row, unit)):
            index = first + fx.Int32(e)
            found.append(((index < row.length).select(ordered_key(bits), fx.Uint32(0)), index))
    return found


def _fold(elements: Sequence[tuple[Any, Any]], low: bool) -> Fold:
    def fold(step: Any, state: Any) -> Any:
        for key, index in elements:
            rank = rank_of(key, index, ID_BITS, low)
            state = step((key != fx.Uint32(0)).select(rank, fx.Uint64(0)), state)
        return state

    return fold


def _over(value: Any, width: int, combine: Any) -> Any:
    """``value`` (u32) combined over the ``width`` lanes of a part, the same in each."""
    while width > 1:
        width //= 2
        value = combine(value, fx.Uint32(fx.gpu.shuffle_xor(value, width, GROUP)))
    return value


def _how_many_precede(keys: Any, key: Any, part: Any, lane: Any, width: int) -> Any:
    """Of the parts' ``keys`` (shared), those greater than ``key``, which is of part ``part``, or equal and earlier."""
    count = fx.Uint32(0)
    for first in range(0, PARTS, width):
        i = lane + fx.Int32(first)
        other = read(keys, i)
        precedes = (other > key) | ((other == key) & (i < part))
        count = count + precedes.select(fx.Uint32(1), fx.Uint32(0))
    return _over(count, width, lambda a, b: a + b)


@flyc.jit
def _find_floor(elements: Any, need: Any, scratch: Scratch, threads: int) -> Any:
    """A key (u32, not 0) that at least ``need`` (u32) of the block's elements reach; zeroes the count of those found.

    Every thread of the block calls it; it contains two block barriers.
    """
    width = threads // PARTS
    thread = fx.Int32(fx.thread_idx.x)
    part, lane = thread // fx.Int32(width), thread % fx.Int32(width)
    best = elements[0][0]
    for key, _ in elements[1:]:
        best = fx.arith.max(best, key)
    best = _over(best, width, fx.arith.max)
    totals, found = scratch.totals, scratch.found
    if lane == fx.Int32(0):
        write(totals, part, best)
    if thread == fx.Int32(0):
        write(found, 0, fx.Uint32(1))
        write(found, _GATHERED, fx.Uint32(0))
    fx.gpu.barrier()
    before = _how_many_precede(totals, best, part, lane, width)
    if (lane == fx.Int32(0)) & (before + fx.Uint32(1) == need) & (best > fx.Uint32(0)):
        write(found, 0, best)
    fx.gpu.barrier()
    return read(found, 0)


@flyc.jit
def _gather(chosen: Any, floor: Any, low: bool, key: Any, index: Any, place: Any) -> Any:
    if (key >= floor) & (place < fx.Uint32(ROOM)):
        write(chosen, fx.Int32(place), rank_of(key, index, ID_BITS, low))
    return place + (key >= floor).select(fx.Uint32(1), fx.Uint32(0))


@flyc.jit
def _select(
    elements: Any, total: Any, floor: Any, need: Any, chosen: Any, low: bool, scratch: Scratch, threads: int
) -> Any:
    """At most 64 of the ``total`` that reach the floor, to ``chosen``; how many."""
    fold = _fold(elements, low)
    clear(scratch, threads)
    reached = fx.Uint64(floor) << fx.Uint64(ID_BITS)
    bound = refine(fold, total, reached, need, fx.Uint32(ROOM), ID_BITS, scratch, threads)
    place, count = places(fold, bound, scratch, threads)
    compact(fold, bound, place, lambda i, rank: write(chosen, fx.Int32(i), rank))
    fx.gpu.barrier()
    return count


@flyc.jit
def nominate_few(elements: Any, need: Any, chosen: Any, low: bool, scratch: Scratch, threads: int) -> Any:
    """Write the greatest of the block's elements to ``chosen``, as ranks: at least ``need`` (u32, at most 64, and no
    more than there are) and at most 64; how many (u32).

    ``elements``: this thread's. ``threads``: a multiple of :data:`PARTS`, at most 1024. Deterministic as a set, not in
    its order. Every thread of the block calls it; it ends with a block barrier.
    """
    floor = _find_floor(elements, need, scratch, threads)
    count = fx.Uint32(0)
    for key, _ in elements:
        count = count + (key >= floor).select(fx.Uint32(1), fx.Uint32(0))
    if count > fx.Uint32(0):
        place = fx.Uint32(fx.atomic_add(scratch.found + _GATHERED, count, syncscope="workgroup"))
        for key, index in elements:
            place = _gather(chosen, floor, low, key, index, place)
    fx.gpu.barrier()
    total = read(scratch.found, _GATHERED)
    if total > fx.Uint32(ROOM):
        total = _select(elements, total, floor, need, chosen, low, scratch, threads)
    return total
