# SPDX-License-Identifier: Apache-2.0
"""Histograms of 8-bit digits, exchanged by all ranks: what a selection over the ranks is made of.

An exchange is an epoch of the channel. A histogram is 128 *words* (:mod:`flycomm.primitives.candidates`: 56 bits and
the tag of the epoch) of two counts of 25 bits, because an id has 24, and 6 bits of the call's tag, so ranks that call
differently find that out. Thread ``t`` < 64 pushes and takes pair ``t``, in every epoch of its block: so two buffers
are enough, and no slot ever rests. The proof is in the docs' memory model of the top-k exchange.
"""

from collections.abc import Sequence
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.channel import REASONS
from flycomm.primitives.block_scan import read, write
from flycomm.primitives.call import Call, fail
from flycomm.primitives.candidates import WORD_BYTES, push_candidates, take_candidates
from flycomm.primitives.peers import peer_rank

DIGIT = 8  # bits
WORDS = 128  # of a histogram
HISTOGRAM_BYTES = WORDS * WORD_BYTES  # a block and source
_PAIRS = WORDS // 2
PER_THREAD = (1 << DIGIT) // _PAIRS  # bins
_COUNT_BITS, _TAG_PIECE = 25, 6
_MISMATCH = REASONS.index("mismatch")


def _piece(call: Call, word: Any) -> Any:
    """6 bits (u64) of the call's tag, others in the next word; six words have all of it."""
    shift = (fx.Uint32(word) % fx.Uint32(6)) * fx.Uint32(_TAG_PIECE)
    return (fx.Uint64(call.tag) >> fx.Uint64(shift)) & fx.Uint64((1 << _TAG_PIECE) - 1)


def bin_of(i: int) -> Any:
    """The digit (i32) of this thread's ``i``-th bin: they fall from thread to thread, to below 0 from thread 64 on."""
    return fx.Int32((1 << DIGIT) - 1 - i) - fx.Int32(fx.thread_idx.x) * fx.Int32(PER_THREAD)


def _counts(word: Any) -> list[Any]:
    mask = fx.Uint64((1 << _COUNT_BITS) - 1)
    return [fx.Uint32((word >> fx.Uint64(shift)) & mask) for shift in (0, _COUNT_BITS)]


@flyc.jit
def exchange_histogram(call: Call, histogram: Any) -> Any:
    """This thread's :data:`PER_THREAD` bins (u32), as counted here, and of every peer: ``(own, theirs)``.

    Every thread of the block calls it, once an epoch of the channel, ``call`` being of that epoch, after a block
    barrier that ends the counting in ``histogram`` (shared, u32); zeroes the bins. ``theirs``: flat, in the order of
    ``segment(comm, 1)``, …; threads from 64 on have only zeros. Waits for every peer, up to ``comm.limit``; after the
    next block barrier ``call.failed`` says whether one did not come, or called with another tag.
    """
    own = [fx.Uint32(0) for _ in range(PER_THREAD)]
    theirs = [fx.Uint32(0) for _ in range(PER_THREAD * (call.comm.world - 1))]
    pair = fx.Int32(fx.thread_idx.x)
    if pair < fx.Int32(_PAIRS):
        own = [read(histogram, bin_of(i)) for i in range(PER_THREAD)]
        for i in fx.range_constexpr(PER_THREAD):
            write(histogram, bin_of(i), fx.Uint32(0))
        if fx.const_expr(call.comm.world > 1):
            pieces = [_piece(call, pair * fx.Int32(2) + fx.Int32(half)) for half in range(2)]
            words = [
                fx.Uint64(own[2 * half])
                | (fx.Uint64(own[2 * half + 1]) << fx.Uint64(_COUNT_BITS))
                | (pieces[half] << fx.Uint64(2 * _COUNT_BITS))
                for half in range(2)
            ]
            push_candidates(call, words, pair, WORDS, range(1, call.comm.world))
            theirs = _take(call, pair, pieces)
    return own, theirs


@flyc.jit
def _take(call: Call, pair: Any, pieces: Sequence[Any]) -> Any:
    peers = [peer_rank(call.comm, j) for j in range(1, call.comm.world)]
    words = take_candidates(call, [pair] * len(peers), peers, fx.Boolean(True), WORDS, False)
    seen = [word >> fx.Uint64(2 * _COUNT_BITS) for word in words]
    peer, expected, found = peers[0], seen[0], seen[0]
    for i in fx.range_constexpr(len(words)):
        wrong = seen[i] != pieces[i % 2]
        peer, expected = wrong.select(peers[i // 2], peer), wrong.select(pieces[i % 2], expected)
        found = wrong.select(seen[i], found)
    if call.live & (expected != found):  # of a word that did not come the wait has told already
        fail(call, "candidate", peer, fx.Uint32(expected), fx.Uint32(found), fx.Int32(_MISMATCH))
    return [count for word in words for count in _counts(word)]


def sum_over(own: Sequence[Any], theirs: Sequence[Any]) -> list[Any]:
    """This thread's bins over all ranks, from what :func:`exchange_histogram` gives."""
    sums = list(own)
    for i, count in enumerate(theirs):
        sums[i % PER_THREAD] = sums[i % PER_THREAD] + count
    return sums
