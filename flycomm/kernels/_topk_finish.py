# SPDX-License-Identifier: Apache-2.0
"""What both kernels of ``topk_local`` end with: exact selection into shared memory, order, output."""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.kernels._topk_plan import Plan
from flycomm.primitives.access import store_element
from flycomm.primitives.select import (
    GROUP,
    Fold,
    Scratch,
    compact,
    element_of,
    places,
    read,
    refine,
    score_of,
    write,
)
from flycomm.primitives.sort import sort_block
from flycomm.primitives.spread import BIN_ROOM

_AT_ONCE = 8  # ranks that are looked at while none is waited for
_KEY_BITS = 32
_INDEX_MASK = 0x7FFFFFFF


class Rules:
    """What is selected, at compile time: ``k`` is the class, ``by_score`` the order, ``low`` which of equals wins."""

    def __init__(self, plan: Plan, by_score: bool, low: bool):
        self.threads = plan.threads
        self.k = plan.k
        self.small = plan.k == 2 * GROUP
        self.room = plan.k if plan.blocks == 1 else plan.k + BIN_ROOM  # ranks
        self.index_bits = plan.index_bits
        self.by_score = by_score
        self.low = low


def least(rules: Rules) -> Any:
    """The rank that every element reaches."""
    return fx.Uint64(1 << rules.index_bits)


def room_of(rules: Rules, need: Any) -> Any:
    """How many may be sorted: for the order by score the rest falls behind, for the other none may be there."""
    return fx.Uint32(rules.k) if rules.by_score else need


def select(rules: Rules, fold: Fold, total: Any, need: Any, scratch: Scratch, chosen: Any) -> Any:
    """Write at least ``need`` of the greatest of ``total`` ranks to ``chosen``, at most the room; how many."""
    floor, room = least(rules), room_of(rules, need)
    bound = refine(fold, total, floor, need, room, rules.index_bits, scratch, rules.threads)
    place, count = places(fold, bound, scratch, rules.threads)
    compact(fold, bound, place, lambda i, rank: write(chosen, fx.Int32(i), rank))
    return count


@flyc.jit
def _arrange(rules: Rules, scratch: Scratch, chosen: Any, total: Any) -> None:
    """Pad ``chosen`` to the class of k and sort it: by rank, or by falling complement of the index."""
    thread = fx.Int32(fx.thread_idx.x)
    fx.gpu.barrier()
    i = thread
    while i < fx.Int32(rules.k):
        rank = read(chosen, i, fx.Uint64)
        if fx.const_expr(not rules.by_score):
            key, index = element_of(rank, rules.index_bits, rules.low)
            rank = (fx.Uint64(fx.Uint32(index) ^ fx.Uint32(_INDEX_MASK)) << fx.Uint64(_KEY_BITS)) | fx.Uint64(key)
        write(chosen, i, (fx.Uint32(i) < total).select(rank, fx.Uint64(0)))
        i = i + fx.Int32(rules.threads)
    fx.gpu.barrier()
    sort_block(chosen, rules.k, rules.index_bits if rules.by_score else _KEY_BITS, scratch, rules.threads)


@flyc.jit
def _write_out(rules: Rules, chosen: Any, need: Any, scores: Any, ids: Any, k: Any) -> None:
    i = fx.Int32(fx.thread_idx.x)
    while i < k:
        rank = read(chosen, i, fx.Uint64)
        if fx.const_expr(rules.by_score):
            key, index = element_of(rank, rules.index_bits, rules.low)
        else:
            key, index = fx.Uint32(rank), fx.Int32(fx.Uint32(rank >> fx.Uint64(_KEY_BITS)) ^ fx.Uint32(_INDEX_MASK))
        held = fx.Uint32(i) < need
        offset = fx.Int64(i) * fx.Int64(4)
        store_element(scores + offset, held.select(score_of(key), fx.Float32(float("-inf"))))
        store_element(ids + offset, held.select(index, fx.Int32(-1)))
        i = i + fx.Int32(rules.threads)


@flyc.jit
def _write_few(rules: Rules, chosen: Any, total: Any, scores: Any, ids: Any, k: Any) -> None:
    """As many threads as there may be ranks: each counts those before its own, and writes it where it belongs."""
    fx.gpu.barrier()
    i = fx.Int32(fx.thread_idx.x)
    if i < fx.Int32(rules.k):
        rank = read(chosen, i, fx.Uint64)
        key, index = element_of(rank, rules.index_bits, rules.low)
        place, first = fx.Uint32(0), fx.Uint32(0)
        while first < total:
            for j in fx.range_constexpr(_AT_ONCE):
                other = read(chosen, fx.Int32(first) + fx.Int32(j), fx.Uint64)
                before = other > rank
                if fx.const_expr(not rules.by_score):
                    before = element_of(other, rules.index_bits, rules.low)[1] < index
                before = before & (first + fx.Uint32(j) < total)
                place = place + before.select(fx.Uint32(1), fx.Uint32(0))
            first = first + fx.Uint32(_AT_ONCE)
        held = fx.Uint32(i) < total
        place = held.select(place, fx.Uint32(i))
        if place < fx.Uint32(k):
            offset = fx.Int64(place) * fx.Int64(4)
            store_element(scores + offset, held.select(score_of(key), fx.Float32(float("-inf"))))
            store_element(ids + offset, held.select(index, fx.Int32(-1)))


@flyc.jit
def finish(
    rules: Rules, scratch: Scratch, chosen: Any, total: Any, ordered: Any, need: Any, scores: Any, ids: Any, k: Any
) -> None:
    """Write the best ``need`` of the ``total`` ranks in ``chosen`` to ``scores`` and ``ids``, in order, padded up to k.

    ``ordered``: they fall already, and a block barrier followed. By index none but these ``need`` may be there.
    """
    if fx.const_expr(rules.small):
        _write_few(rules, chosen, total, scores, ids, k)
    else:
        if fx.const_expr(rules.by_score):
            if ordered == fx.Boolean(False):
                _arrange(rules, scratch, chosen, total)
        else:
            _arrange(rules, scratch, chosen, total)
        _write_out(rules, chosen, need, scores, ids, k)
