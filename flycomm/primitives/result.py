# SPDX-License-Identifier: Apache-2.0
"""What a top-k writes: which order, which of equals, padding, counts."""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives.access import store_element
from flycomm.primitives.block_scan import Scratch, read, write
from flycomm.primitives.candidates import ID_BITS
from flycomm.primitives.rank import element_of, rank_of, score_of
from flycomm.primitives.sort import sort_block

_KEY_BITS = 32
_INDEX_MASK = 0x7FFFFFFF
_INFINITY = 0xFF800000  # the key of +inf


class Rule:
    """What comes out, at compile time. ``k``: class; ``by_score``: the order, else by id; ``low``: of equals the lower
    id wins; ``own``: of the best only those that this rank nominated; ``reset``: as for ``take_candidates``."""

    def __init__(self, k: int, threads: int, by_score: bool, low: bool, own: bool, reset: bool):
        self.k = k
        self.threads = threads
        self.by_score = by_score
        self.low = low
        self.own = own
        self.reset = reset


def sorted_by(rule: Rule, rank: Any) -> Any:
    """What falls in the order of the output, and is 0 for none: the rank, or its complemented id above its key."""
    if rule.by_score:
        return rank
    key, index = element_of(rank, ID_BITS, rule.low)
    turned = (fx.Uint64(fx.Uint32(index) ^ fx.Uint32(_INDEX_MASK)) << fx.Uint64(_KEY_BITS)) | fx.Uint64(key)
    return (rank != fx.Uint64(0)).select(turned, fx.Uint64(0))


def unsorted(rule: Rule, word: Any) -> Any:
    """The rank of which ``word`` is what :func:`sorted_by` gives."""
    if rule.by_score:
        return word
    index = fx.Int32(fx.Uint32(word >> fx.Uint64(_KEY_BITS)) ^ fx.Uint32(_INDEX_MASK))
    return (word != fx.Uint64(0)).select(rank_of(fx.Uint32(word), index, ID_BITS, rule.low), fx.Uint64(0))


@flyc.jit
def keep(chosen: Any, room: int, i: Any, rank: Any) -> None:
    """Write ``chosen[i]`` (``i`` u32). Ranks that disagree about who has which id can have it twice: nothing is written
    past the end then."""
    if i < fx.Uint32(room):
        write(chosen, fx.Int32(i), rank)


@flyc.jit
def arrange(rule: Rule, chosen: Any, count: Any, scratch: Scratch) -> None:
    """Sort the first ``count`` (u32) ranks in ``chosen`` by :func:`sorted_by`, and fill what follows with 0.

    Every thread of the block calls it; it begins and ends with a block barrier.
    """
    fx.gpu.barrier()
    i = fx.Int32(fx.thread_idx.x)
    while i < fx.Int32(rule.k):
        rank = sorted_by(rule, read(chosen, i, fx.Uint64))
        write(chosen, i, (fx.Uint32(i) < count).select(rank, fx.Uint64(0)))
        i = i + fx.Int32(rule.threads)
    fx.gpu.barrier()
    sort_block(chosen, rule.k, ID_BITS if rule.by_score else _KEY_BITS, scratch, rule.threads)


@flyc.jit
def emit(rule: Rule, chosen: Any, k: Any, mine: Any, ok: Any, scores: Any, ids: Any, count: Any) -> None:
    """Write a row: f32 scores and i32 ids, ``k`` of each, and one i32 count, at i64 addresses, from sorted ``chosen``.

    Padding is -inf and -1, all of it if the row is not ``mine`` (bool). If not ``ok``: NaN, -1, and a count of -1. A
    forced id has the score +inf.
    """
    i = fx.Int32(fx.thread_idx.x)
    good = mine & ok
    rest = ok.select(fx.Float32(float("-inf")), fx.Float32(float("nan")))
    while i < k:
        word = read(chosen, i, fx.Uint64)
        if fx.const_expr(rule.by_score):
            key, index = element_of(word, ID_BITS, rule.low)
        else:
            key, index = fx.Uint32(word), fx.Int32(fx.Uint32(word >> fx.Uint64(_KEY_BITS)) ^ fx.Uint32(_INDEX_MASK))
        key = (key > fx.Uint32(_INFINITY)).select(fx.Uint32(_INFINITY), key)
        held = good & (word != fx.Uint64(0))
        store_element(scores + fx.Int64(i) * fx.Int64(4), held.select(score_of(key), rest))
        store_element(ids + fx.Int64(i) * fx.Int64(4), held.select(index, fx.Int32(-1)))
        after = i + fx.Int32(1)
        more = (after < k) & (read(chosen, (after < k).select(after, i), fx.Uint64) != fx.Uint64(0))
        if held & (more == fx.Boolean(False)):
            store_element(count, after)
        if (i == fx.Int32(0)) & (held == fx.Boolean(False)):
            store_element(count, ok.select(fx.Int32(0), fx.Int32(-1)))
        i = i + fx.Int32(rule.threads)
