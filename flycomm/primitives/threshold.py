# SPDX-License-Identifier: Apache-2.0
"""A row's threshold over all ranks: radix selection whose every histogram is summed over the ranks.

No rank's keys move, only counts (:mod:`flycomm.primitives.digits`), 1 KiB a round and peer, whatever k and however long
the row; and every rank finds the same digits. Exact, always: the last digits are of ids, which differ.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives.block_scan import Scratch, block_scan, read, write
from flycomm.primitives.call import Call, again
from flycomm.primitives.candidates import ID_BITS
from flycomm.primitives.digits import DIGIT, PER_THREAD, bin_of, exchange_histogram, sum_over
from flycomm.primitives.nominate import least
from flycomm.primitives.select import Fold

COUNTERS = 1 << DIGIT  # where, in ``scratch.histogram``, it is said how many each peer has
_KEY_BITS = 32 + ID_BITS
_WHOLE = ((1 << 32) - 1) << ID_BITS  # a rank but for its id
_NOTHING = (1 << 64) - 1  # above every rank


def floor_of(bound: Any) -> Any:
    """The least rank (u64) with the score of ``bound``."""
    return bound & fx.Uint64(_WHOLE)


@flyc.jit
def _count(histogram: Any, prefix: Any, shift: Any, rank: Any, state: Any) -> Any:
    lower = shift - fx.Uint64(DIGIT)
    if (rank != fx.Uint64(0)) & ((rank >> shift) == prefix):
        digit = fx.Int32(fx.Uint32(rank >> lower) & fx.Uint32((1 << DIGIT) - 1))
        fx.atomic_add(histogram + digit, fx.Uint32(1), syncscope="workgroup")
    return state


@flyc.jit
def _find(bins: Sequence[Any], greater: Any, wanted: Any, scratch: Scratch) -> Any:
    """The digit of the ``wanted``-th greatest, how many are greater than the digit's, how many have it."""
    found = scratch.found
    for i in fx.range_constexpr(PER_THREAD):
        if (greater < wanted) & (wanted <= greater + bins[i]):
            write(found, 0, fx.Uint32(bin_of(i)))
            write(found, 1, greater)
            write(found, 2, bins[i])
        greater = greater + bins[i]
    fx.gpu.barrier()
    return read(found, 0), read(found, 1), read(found, 2)


def _above(digit: Any, other: Any) -> Any:
    return other > fx.Int32(digit)


def _equals(digit: Any, other: Any) -> Any:
    return other == fx.Int32(digit)


def _of_peer(theirs: Sequence[Any], j: int, holds: Callable[[Any], Any]) -> Any:
    """How many of peer ``j``'s elements in this thread's bins have a digit that ``holds``."""
    count = fx.Uint32(0)
    for i in range(PER_THREAD):
        count = count + holds(bin_of(i)).select(theirs[PER_THREAD * (j - 1) + i], fx.Uint32(0))
    return count


@flyc.jit
def find_threshold(
    call: Call, epoch: Any, ok: Any, rough: Fold, exact: Callable[[Any], Fold], k: Any, room: int,
    scratch: Scratch, threads: int,
) -> Any:  # fmt: skip
    """The threshold of a row's best ``k`` (i32) over all ranks, and in ``scratch`` how many each peer has of them.

    Every thread of the block calls it, ``threads`` >= 64, on every rank. ``call``: what ``begin`` gave; ``epoch`` (u32)
    and ``ok`` (bool) are those that the row before left, or ``call.entered`` and ``call.live``. ``rough``: this rank's
    ranks, of which only the score must be right; ``exact(floor)``: all those that are not below ``floor`` (u64, of
    which the id is 0), right to the last bit. ``scratch.histogram`` is 0, and a block barrier lay after that.

    Returns ``(bound, epoch, ok)``. Not below ``bound`` (u64) are all elements that there are, or at least ``k`` and at
    most ``room`` (compile-time, 0: exactly ``k``) of all ranks; none if not ``ok``. It ends with the round in which
    that is so: the first if there are no more than ``k``, the seventh at the latest. A round is an epoch, and there is
    one at least if ``ok``. More than ``room`` there are only where ranks give out one id twice. The words at
    :data:`COUNTERS` of the histogram, peer ``j``'s at ``j``, are right after a block barrier.
    """
    histogram, world = scratch.histogram, call.comm.world
    shift, prefix = fx.Uint64(_KEY_BITS), fx.Uint64(0)
    above, inside, need = fx.Uint32(0), fx.Uint32(0), fx.Uint32(0)
    counted = [fx.Uint32(0) for _ in range(1, world)]
    equal = [fx.Uint32(0) for _ in range(1, world)]
    more = ok
    while more:
        one = again(call, epoch, ok, fx.Boolean(False))
        if shift > fx.Uint64(ID_BITS):
            rough(partial(_count, histogram, prefix, shift), fx.Uint32(0))
        else:
            exact(floor_of(prefix << shift))(partial(_count, histogram, prefix, shift), fx.Uint32(0))
        fx.gpu.barrier()
        own, theirs = exchange_histogram(one, histogram)
        bins = sum_over(own, theirs)
        greater, total = block_scan(bins[0] + bins[1] + bins[2] + bins[3], scratch, threads)
        ok = one.live & (one.failed[0] == fx.Int32(0))
        wanted = (fx.Uint32(k) < total).select(fx.Uint32(k), total)
        need = (shift == fx.Uint64(_KEY_BITS)).select(wanted, need)
        digit, greater, inside = _find(bins, greater, need - above, scratch)
        counted = [counted[j - 1] + _of_peer(theirs, j, partial(_above, digit)) for j in range(1, world)]
        equal = [_of_peer(theirs, j, partial(_equals, digit)) for j in range(1, world)]
        above = above + greater
        shift = shift - fx.Uint64(DIGIT)
        prefix = (prefix << fx.Uint64(DIGIT)) | fx.Uint64(digit)
        epoch = one.epoch
        most = fx.Uint32(room) if room else need
        more = ok & (need > fx.Uint32(0)) & (above + inside > most) & (shift > fx.Uint64(0))
    some = ok & (need > fx.Uint32(0))
    for j in fx.range_constexpr(1, world):
        if some & (counted[j - 1] + equal[j - 1] > fx.Uint32(0)):
            fx.atomic_add(histogram + fx.Int32(COUNTERS + j), counted[j - 1] + equal[j - 1], syncscope="workgroup")
    bound = prefix << shift
    bound = (bound > least()).select(bound, least())  # 0 is no element
    bound = some.select(bound, fx.Uint64(_NOTHING))
    return bound, epoch, ok
