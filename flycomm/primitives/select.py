# SPDX-License-Identifier: Apache-2.0
"""Exact selection of the greatest ranks by one block: radix refinement with digits of 11 bits.

Elements reach these functions through a *fold*: ``fold(step, state)`` calls ``state = step(rank, state)`` for each of
this thread's elements and returns the last state. They may lie in registers, shared or global memory. A rank
(:mod:`flycomm.primitives.rank`) of 0 is no element.

For blocks of :mod:`flycomm.primitives.block_scan`, of which every thread makes every call. Nothing here orders global
memory. All of it may be captured.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives.block_scan import BINS, DIGIT, GROUP, Scratch, block_scan, clear, group_or, read, write
from flycomm.primitives.rank import element_of, ordered_key, rank_of, score_of

__all__ = [
    "GROUP",
    "Fold",
    "Scratch",
    "block_scan",
    "clear",
    "compact",
    "element_of",
    "ordered_key",
    "places",
    "rank_of",
    "read",
    "refine",
    "score_of",
    "write",
]

Fold = Callable[[Callable[[Any, Any], Any], Any], Any]


@flyc.jit
def _count(histogram: Any, floor: Any, shift: Any, prefix: Any, lower: Any, rank: Any, state: Any) -> Any:
    if (rank >= floor) & ((rank >> shift) == prefix):
        digit = fx.Int32(fx.Uint32(rank >> lower) & ((fx.Uint32(1) << fx.Uint32(shift - lower)) - fx.Uint32(1)))
        fx.atomic_add(histogram + digit, fx.Uint32(1), syncscope="workgroup")
    return state


@flyc.jit
def _find(scratch: Scratch, need: Any, threads: int) -> Any:
    """The digit of the ``need``-th greatest, how many are greater than the digit's, how many have it. Clears."""
    histogram, found = scratch.histogram, scratch.found
    each = BINS // threads
    top = fx.Int32(BINS - 1) - fx.Int32(fx.thread_idx.x) * fx.Int32(each)
    counts = [read(histogram, top - fx.Int32(i)) for i in range(each)]
    total = fx.Uint32(0)
    for i in fx.range_constexpr(each):
        write(histogram, top - fx.Int32(i), fx.Uint32(0))
        total = total + counts[i]
    greater, _ = block_scan(total, scratch, threads)
    for i in fx.range_constexpr(each):
        if (greater < need) & (need <= greater + counts[i]):
            write(found, 0, fx.Uint32(top - fx.Int32(i)))
            write(found, 1, greater)
            write(found, 2, counts[i])
        greater = greater + counts[i]
    fx.gpu.barrier()
    return read(found, 0), read(found, 1), read(found, 2)


def _spread(floor: Any, index_bits: int, rank: Any, seen: Any) -> Any:
    """Which bits of keys are 1 somewhere (upper half), and 0 somewhere."""
    key = fx.Uint32(rank >> fx.Uint64(index_bits))
    both = (fx.Uint64(key) << fx.Uint64(32)) | fx.Uint64(key ^ fx.Uint32(0xFFFFFFFF))
    return seen | (rank >= floor).select(both, fx.Uint64(0))


@flyc.jit
def _common(fold: Fold, floor: Any, index_bits: int, scratch: Scratch, threads: int) -> Any:
    """The bits that all keys begin with, as a rank without its lower bits, and how many bits those are (u64)."""
    thread = fx.Int32(fx.thread_idx.x)
    lane, group = thread % fx.Int32(GROUP), thread // fx.Int32(GROUP)
    totals = scratch.totals
    seen = fold(partial(_spread, floor, index_bits), fx.Uint64(0))
    halves = [group_or(half) for half in (fx.Uint32(seen >> fx.Uint64(32)), fx.Uint32(seen))]
    if lane == fx.Int32(0):
        write(totals, group, halves[0])
        write(totals, group + fx.Int32(GROUP), halves[1])
    fx.gpu.barrier()
    there = lane < fx.Int32(threads // GROUP)
    mine = there.select(lane, fx.Int32(0))
    ones, zeros = [group_or(read(totals, mine + fx.Int32(half * GROUP))) for half in range(2)]
    differ = fx.Uint64(fx.Uint32(32) - fx.Uint32(fx.math.ctlz(ones & zeros)))
    return fx.Uint64(ones) >> differ, differ + fx.Uint64(index_bits)


@flyc.jit
def refine(
    fold: Fold, total: Any, floor: Any, need: Any, room: Any, index_bits: int, scratch: Scratch, threads: int
) -> Any:
    """A rank (u64), not below ``floor``, which at least ``need`` and at most ``room`` elements are not below.

    ``total`` (u32): how many elements the block has that are not below ``floor`` (u64); others are not looked at.
    ``need`` <= ``total`` and ``need`` <= ``room`` (u32), the same in all threads. With ``room`` = ``need`` the
    selection is exact. If ``total`` fits, nothing is looked at; else every element once to find the bits in which keys
    differ at all, so that digits spread, and once for each 11 bits that are needed. Each time contains block barriers.
    The result does not depend on the order of elements. Elements that are equal in all bits are more than ``room`` if
    the last bit does not part them: who cannot exclude that (ranks that disagree) bounds what it stores.
    """
    shift, prefix = fx.Uint64(0), fx.Uint64(0)
    above = fx.Uint32(0)
    inside = total
    if total > room:
        prefix, shift = _common(fold, floor, index_bits, scratch, threads)
    while (above + inside > room) & (shift > fx.Uint64(0)):
        lower = (shift > fx.Uint64(DIGIT)).select(shift - fx.Uint64(DIGIT), fx.Uint64(0))
        fold(partial(_count, scratch.histogram, floor, shift, prefix, lower), fx.Uint32(0))
        fx.gpu.barrier()
        digit, greater, inside = _find(scratch, need - above, threads)
        prefix = (prefix << (shift - lower)) | fx.Uint64(digit)
        above = above + greater
        shift = lower
    bound = prefix << shift
    return (bound > floor).select(bound, floor)


def _tally(bound: Any, rank: Any, count: Any) -> Any:
    return count + (rank >= bound).select(fx.Uint32(1), fx.Uint32(0))


@flyc.jit
def _put(bound: Any, store: Callable[[Any, Any], None], rank: Any, place: Any) -> Any:
    if rank >= bound:
        store(place, rank)
    return place + (rank >= bound).select(fx.Uint32(1), fx.Uint32(0))


def places(fold: Fold, bound: Any, scratch: Scratch, threads: int) -> tuple[Any, Any]:
    """Where this thread's elements not below ``bound`` go, and how many the block has: by a :func:`block_scan`."""
    return block_scan(fold(partial(_tally, bound), fx.Uint32(0)), scratch, threads)


def compact(fold: Fold, bound: Any, place: Any, store: Callable[[Any, Any], None]) -> None:
    """``store(i, rank)`` this thread's elements not below ``bound``, ``i`` (u32) counting from ``place``."""
    fold(partial(_put, bound, store), place)
