# SPDX-License-Identifier: Apache-2.0
"""Exact selection of the greatest ranks by one block: radix refinement with digits of 11 bits.

Elements reach these functions through a *fold*: ``fold(step, state)`` calls ``state = step(rank, state)`` for each of
this thread's elements and returns the last state. They may lie in registers, shared or global memory. A rank
(:mod:`flycomm.primitives.rank`) of 0 is no element.

For blocks of :mod:`flycomm.primitives.block_scan`, of which every thread makes every call. Orders no global memory.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives.block_scan import BINS, DIGIT, GROUP, Scratch, block_scan, clear, group_max, read, write
from flycomm.primitives.rank import element_of, ordered_key, rank_of, score_of

__all__ = [
    "GROUP",
    "Fold",
    "Scratch",
    "block_scan",
    "clear",
    "compact",
    "element_of",
    "key_range",
    "ordered_key",
    "places",
    "rank_of",
    "read",
    "refine",
    "score_of",
    "tally",
    "write",
]

Fold = Callable[[Callable[[Any, Any], Any], Any], Any]


@flyc.jit
def _count(histogram: Any, floor: Any, base: Any, shift: Any, prefix: Any, lower: Any, rank: Any, state: Any) -> Any:
    offset = rank - base
    if (rank >= floor) & ((offset >> shift) == prefix):
        digit = fx.Int32(fx.Uint32(offset >> lower) & ((fx.Uint32(1) << fx.Uint32(shift - lower)) - fx.Uint32(1)))
        fx.atomic_add(histogram + digit, fx.Uint32(1), syncscope="workgroup")
    return state


@flyc.jit
def _find(scratch: Scratch, need: Any, threads: int) -> Any:
    """The digit of the ``need``-th greatest, how many are greater than the digit's, how many have it. Clears."""
    histogram, found, each = scratch.histogram, scratch.found, BINS // threads
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


def _widen(floor: Any, index_bits: int, rank: Any, seen: Any) -> Any:
    """The greatest key (upper half), and the greatest complement of one."""
    key = fx.Uint32(rank >> fx.Uint64(index_bits))
    keys = [(rank >= floor).select(one, fx.Uint32(0)) for one in (key, key ^ fx.Uint32(0xFFFFFFFF))]
    high, low = fx.arith.max(keys[0], fx.Uint32(seen >> fx.Uint64(32))), fx.arith.max(keys[1], fx.Uint32(seen))
    return (fx.Uint64(high) << fx.Uint64(32)) | fx.Uint64(low)


@flyc.jit
def key_range(fold: Fold, floor: Any, index_bits: int, scratch: Scratch, threads: int) -> Any:
    """The least and the greatest key (u32) of ranks not below ``floor``, else 2**32 - 1 and 0. One block barrier."""
    thread = fx.Int32(fx.thread_idx.x)
    lane, group = thread % fx.Int32(GROUP), thread // fx.Int32(GROUP)
    totals = scratch.totals
    seen = fold(partial(_widen, floor, index_bits), fx.Uint64(0))
    halves = [group_max(half) for half in (fx.Uint32(seen >> fx.Uint64(32)), fx.Uint32(seen))]
    if lane == fx.Int32(0):
        write(totals, group, halves[0])
        write(totals, group + fx.Int32(GROUP), halves[1])
    fx.gpu.barrier()
    mine = (lane < fx.Int32(threads // GROUP)).select(lane, fx.Int32(0))
    greatest, turned = [group_max(read(totals, mine + fx.Int32(half * GROUP))) for half in range(2)]
    return turned ^ fx.Uint32(0xFFFFFFFF), greatest


@flyc.jit
def refine(
    fold: Fold, total: Any, floor: Any, need: Any, room: Any, index_bits: int, scratch: Scratch, threads: int
) -> Any:
    """A rank (u64), not below ``floor``, which at least ``need`` and at most ``room`` elements are not below.

    ``total`` (u32): how many elements the block has that are not below ``floor`` (u64), or more; others do not count.
    ``need`` <= ``total`` and ``need`` <= ``room`` (u32), the same in all threads. With ``room`` = ``need`` the
    selection is exact. If ``total`` fits, nothing is looked at; else every element once for the least key and the
    greatest, between which digits are spread, and once for each 11 bits needed. Each time contains block barriers.
    The result does not depend on the order of elements. Elements that are equal in all bits are more than ``room`` if
    the last bit does not part them: who cannot exclude that (ranks that disagree) bounds what it stores.
    """
    bound = floor
    if total > room:
        least, greatest = key_range(fold, floor, index_bits, scratch, threads)
        base, prefix = fx.Uint64(least) << fx.Uint64(index_bits), fx.Uint64(0)
        differ = fx.Uint32(32) - fx.Uint32(fx.math.ctlz(greatest - least))  # bits
        shift = fx.Uint64(differ) + fx.Uint64(index_bits)
        above, inside = fx.Uint32(0), total
        while (above + inside > room) & (shift > fx.Uint64(0)):  # at least once: totals are written again after it
            lower = (shift > fx.Uint64(DIGIT)).select(shift - fx.Uint64(DIGIT), fx.Uint64(0))
            fold(partial(_count, scratch.histogram, floor, base, shift, prefix, lower), fx.Uint32(0))
            fx.gpu.barrier()
            digit, greater, inside = _find(scratch, need - above, threads)
            prefix = (prefix << (shift - lower)) | fx.Uint64(digit)
            above = above + greater
            shift = lower
        bound = fx.arith.max(base + (prefix << shift), floor)
    return bound


def tally(bound: Any, rank: Any, count: Any) -> Any:
    """The step of a fold that counts (u32) what is not below ``bound``."""
    return count + (rank >= bound).select(fx.Uint32(1), fx.Uint32(0))


@flyc.jit
def _put(bound: Any, store: Callable[[Any, Any], None], rank: Any, place: Any) -> Any:
    if rank >= bound:
        store(place, rank)
    return place + (rank >= bound).select(fx.Uint32(1), fx.Uint32(0))


def places(fold: Fold, bound: Any, scratch: Scratch, threads: int) -> tuple[Any, Any]:
    """Where this thread's elements not below ``bound`` go, and how many the block has: by a :func:`block_scan`."""
    return block_scan(fold(partial(tally, bound), fx.Uint32(0)), scratch, threads)


def compact(fold: Fold, bound: Any, place: Any, store: Callable[[Any, Any], None]) -> None:
    """``store(i, rank)`` this thread's elements not below ``bound``, ``i`` (u32) counting from ``place``."""
    fold(partial(_put, bound, store), place)
