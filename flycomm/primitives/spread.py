# SPDX-License-Identifier: Apache-2.0
"""The best ranks of a block in order, by spreading all over bins: a rank is compared with those of its own bin alone.

The bins divide the range of the ranks evenly, the greatest first. So a rank stands behind all of the bins before its
own, and behind those of its own that are greater. Where the range is used unevenly a bin may get too many for that.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives.block_scan import BINS, DIGIT, Scratch, block_scan, clear, read, write
from flycomm.primitives.select import Fold, key_range

BIN_ROOM = 128  # ranks in a bin, at most: with more in each, comparing takes as long as a bitonic sort does
_FINE = 16  # bits of a rank's place in the range, from which its bin follows


class _Bins:
    """The bins of a range of keys (u32), of which ranks below ``floor`` (u64) are left out; trace-time only."""

    def __init__(self, least: Any, greatest: Any, index_bits: int, floor: Any):
        least = fx.arith.min(least, greatest)  # where there is no rank
        self.top = ((fx.Uint64(greatest) + fx.Uint64(1)) << fx.Uint64(index_bits)) - fx.Uint64(1)
        base = fx.arith.max(fx.Uint64(least) << fx.Uint64(index_bits), fx.arith.min(floor, self.top))
        bits = fx.Uint64(64) - fx.Uint64(fx.math.ctlz(self.top - base))
        self.shift = (bits > fx.Uint64(_FINE)).select(bits - fx.Uint64(_FINE), fx.Uint64(0))
        levels = fx.Uint32((self.top - base) >> self.shift) + fx.Uint32(1)
        self.scale = fx.Uint32(1 << (DIGIT + _FINE)) // levels  # rounded down: no rank is beyond the last bin

    def of(self, rank: Any) -> Any:
        """The bin (i32) of a rank of the range; of what is no rank (a row of others, a failed wait) any bin."""
        own = (fx.Uint32((self.top - rank) >> self.shift) * self.scale) >> fx.Uint32(_FINE)
        return fx.Int32(fx.arith.min(own, fx.Uint32(BINS - 1)))


def _count(histogram: Any, bins: _Bins, floor: Any, rank: Any, state: Any) -> Any:
    _add(histogram, bins.of(rank), rank >= floor)
    return state


@flyc.jit
def _add(histogram: Any, own: Any, there: Any) -> None:
    if there:
        fx.atomic_add(histogram + own, fx.Uint32(1), syncscope="workgroup")


def _put(ranks: Any, starts: Any, bins: _Bins, floor: Any, last: Any, rank: Any, state: Any) -> Any:
    own = bins.of(rank)
    _append(ranks, starts, own, rank, (rank >= floor) & (own <= last))
    return state


@flyc.jit
def _append(ranks: Any, starts: Any, own: Any, rank: Any, there: Any) -> None:
    if there:
        i = fx.Uint32(fx.atomic_add(starts + own, fx.Uint32(1), syncscope="workgroup"))
        write(ranks, fx.Int32(i), rank)


@flyc.jit
def load_rank(ranks: Any, i: Any, total: Any) -> Any:
    """The rank at ``i`` (i32) of the first ``total`` (i32) in shared memory; 0 beyond."""
    rank = fx.Uint64(0)
    if i < total:
        rank = read(ranks, i, fx.Uint64)
    return rank


@flyc.jit
def _place(ranks: Any, ends: Any, own: Any, rank: Any, i: Any, total: Any) -> Any:
    """Where a rank of bin ``own`` belongs that is now at ``i``."""
    place = i
    if i < total:
        before = (own > fx.Int32(0)).select(own - fx.Int32(1), fx.Int32(0))
        place = (own > fx.Int32(0)).select(fx.Int32(read(ends, before)), fx.Int32(0))
        other, end = place, fx.Int32(read(ends, own))
        while other < end:
            place = place + (read(ranks, other, fx.Uint64) > rank).select(fx.Int32(1), fx.Int32(0))
            other = other + fx.Int32(1)
    return place


@flyc.jit
def _store(ranks: Any, i: Any, rank: Any, room: int) -> None:
    if i < fx.Int32(room):
        write(ranks, i, rank)


def _compare(ranks: Any, ends: Any, bins: _Bins, at: Sequence[Any], room: int, total: Any) -> None:
    """Bring the ``total`` ranks that lie by bins to their places, and 0 to those behind."""
    held = [load_rank(ranks, i, total) for i in at]
    places = [_place(ranks, ends, bins.of(rank), rank, i, total) for rank, i in zip(held, at, strict=True)]
    fx.gpu.barrier()
    for place, rank in zip(places, held, strict=True):
        _store(ranks, place, rank, room)


@flyc.jit
def spread(
    ranks: Any, room: int, fold: Fold, floor: Any, need: Any, index_bits: int, scratch: Scratch, threads: int
) -> Any:
    """The ``need`` greatest ranks of ``fold``, falling, to the begin of ``ranks`` (``room`` u64 in shared memory).

    ``floor`` (u64): what is less is not looked at; ``need`` (u32), the same in all threads, and ``room`` is at least
    ``need + BIN_ROOM``, or as many as there are. If fewer than ``need`` reach the floor it is all of them, and then 0.
    Returns ``(done, total)``, the same in all threads: how many reach the floor, and whether it was done: not if more
    than :data:`BIN_ROOM` of one bin would be kept; ``ranks`` is then as before. Those that reach the floor differ. The
    fold may have been read from ``ranks``, into registers.

    Every thread of the block calls it, after a block barrier; it ends with one. Clears the histogram, as for a
    refinement. Looks at every element three times.
    """
    thread, each = fx.Int32(fx.thread_idx.x), BINS // threads
    histogram, found = scratch.histogram, scratch.found
    clear(scratch, threads)
    least, greatest = key_range(fold, floor, index_bits, scratch, threads)
    bins = _Bins(least, greatest, index_bits, floor)
    if thread == fx.Int32(0):
        write(found, 0, fx.Uint32(0))
    fold(partial(_count, histogram, bins, floor), fx.Uint32(0))
    fx.gpu.barrier()
    first = thread * fx.Int32(each)
    counts = [read(histogram, first + fx.Int32(i)) for i in range(each)]
    start, total = block_scan(sum(counts[1:], counts[0]), scratch, threads)
    for i in fx.range_constexpr(each):
        write(histogram, first + fx.Int32(i), start)
        end = start + counts[i]
        if (start < need) & (counts[i] > fx.Uint32(BIN_ROOM)):
            write(found, 0, fx.Uint32(1))
        if (start < need) & (need <= end):
            write(found, 1, fx.Uint32(first + fx.Int32(i)))
            write(found, 2, end)
        start = end
    fx.gpu.barrier()
    few, enough, some = read(found, 0) == fx.Uint32(0), need <= total, need > fx.Uint32(0)
    if few:
        last = some.select(enough.select(fx.Int32(read(found, 1)), fx.Int32(BINS - 1)), fx.Int32(-1))
        kept = fx.Int32(some.select(enough.select(read(found, 2), total), fx.Uint32(0)))
        fold(partial(_put, ranks, histogram, bins, floor, last), fx.Uint32(0))
        fx.gpu.barrier()
        at = [thread + fx.Int32(j * threads) for j in range(-(-room // threads))]
        _compare(ranks, histogram, bins, at, room, kept)
    clear(scratch, threads)
    fx.gpu.barrier()
    return few, total
