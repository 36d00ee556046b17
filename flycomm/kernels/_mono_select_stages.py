# SPDX-License-Identifier: Apache-2.0
"""The last stages of :mod:`flycomm.kernels.mono_attention_out`: the normed rows, and the best experts of each row.

Selecting is small and has one order: a group of lanes has a token row, adds the parts of its logits, and does the rest
in registers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import flydsl.expr as fx

from flycomm.kernels._mono_products import in_turns
from flycomm.kernels._mono_router_stages import SLICES, Work
from flycomm.kernels._mono_stages import factor, fragment_at, store_if, when
from flycomm.primitives.access import load_element, load_fragment, store_fragment
from flycomm.primitives.activation import exp, sigmoid
from flycomm.primitives.block_scan import group_or
from flycomm.primitives.call import Call
from flycomm.primitives.dot import GROUP, of_lane
from flycomm.primitives.norm import add, fold, fold_lanes
from flycomm.primitives.rank import element_of, ordered_key, rank_of
from flycomm.primitives.select_group import top_of_group

MAX_EXPERTS, MAX_TOP_K = 512, 16  # of one group of lanes
SCORINGS = ("softmax", "sigmoid")
_ID_BITS = 9  # an expert
_TINY = 1e-20  # keeps weights that are all 0 from becoming NaN
_NAN, _INFINITY = float("nan"), 0x7F800000


def store_normed(work: Work, call: Call, scales: Any, weighted: Sequence[Any], normed: Any) -> None:
    """The weighted rows times their factor, by the threads that made them; NaN if the call failed."""
    for own, one in zip(work.owned, weighted, strict=True):
        scale = factor(call, scales, own.row)
        value = (one * fx.Vector.filled(one.numel, scale, fx.Float32)).to(fx.BFloat16)
        when(own.mine, partial(store_fragment, fragment_at(normed, own.index), value))


def _logit(work: Work, row: Any, expert: Any, scale: Any) -> Any:
    """The f32 logit, its slices added in their order."""
    slices = load_fragment(fragment_at(work.logits, row * fx.Int32(work.shape.experts) + expert), fx.Float32)
    total = slices[0]
    for i in range(1, SLICES):
        total = total + slices[i]
    return total * scale


def _is_nan(x: Any) -> Any:
    return (x.bitcast(fx.Uint32) & fx.Uint32(0x7FFFFFFF)) > fx.Uint32(_INFINITY)


def _greater(a: Any, b: Any) -> Any:
    return (a > b).select(a, b)


def _score(scoring: str, logits: Sequence[Any]) -> Callable[[Any], Any]:
    """The score of a logit, of a group that holds all ``logits`` of the row, -inf where there are no more."""
    if scoring == "sigmoid":
        return sigmoid
    most = fold_lanes(fold(logits, _greater), GROUP, _greater)
    total = fold_lanes(fold([exp(logit - most) for logit in logits], add), GROUP, add)
    return lambda logit: exp(logit - most) / total


class Choice(NamedTuple):
    """How experts are chosen, and the addresses of what is read and written for it. Trace-time only."""

    scoring: str  # of SCORINGS
    renormalize: bool
    bias: Any  # (experts,) f32, added to the scores that decide; None: logits decide, with which scores rise
    topk_ids: Any  # (rows, top_k) i32
    topk_weights: Any  # (rows, top_k) f32


def select(work: Work, call: Call, scales: Any, how: Choice) -> None:
    """The best experts of each row, and their weights, by one group a row; -1 and NaN where there is no answer."""

    def one(turn: Any, _: Any, kept: Any) -> Any:
        row, inside = work.tile(work.shape.rows, turn)
        when(inside & (row < work.rows), partial(_select_one, work, call, scales, how, row))
        return kept

    in_turns(work.turns(work.shape.rows), one)


def _select_one(work: Work, call: Call, scales: Any, how: Choice, row: Any) -> None:
    k, count, scale = work.shape.top_k, work.shape.experts, scales[row]
    logits, experts = [], []
    for first in range(0, count, GROUP):
        expert = work.lane + fx.Int32(first)
        there = expert < fx.Int32(count)
        logit = _logit(work, row, there.select(expert, fx.Int32(0)), scale)
        logits.append(there.select(logit, fx.Float32(float("-inf"))))
        experts.append((expert, there))
    score = _score(how.scoring, logits)

    ranks = []
    for logit, (expert, there) in zip(logits, experts, strict=True):
        deciding = logit
        if how.bias is not None:
            at = how.bias + fx.Int64(there.select(expert, fx.Int32(0))) * fx.Int64(4)
            deciding = score(logit) + load_element(at, fx.Float32)
        rank = rank_of(ordered_key(deciding.bitcast(fx.Uint32)), expert, _ID_BITS, True)
        ranks.append(there.select(rank, fx.Uint64(0)))
    _, chosen = element_of(of_lane(work.slice, top_of_group(ranks, k)), _ID_BITS, True)

    mine = work.lane < fx.Int32(k)
    weight = mine.select(score(_logit(work, row, chosen, scale)), fx.Float32(0.0))
    if how.renormalize:
        weight = weight / (fold_lanes(weight, GROUP, add) + fx.Float32(_TINY))
    unknown = fold([_is_nan(logit).select(fx.Uint32(1), fx.Uint32(0)) for logit in logits], lambda a, b: a | b)
    good = call.ok & (group_or(unknown) == fx.Uint32(0))
    ids_at, weights_at = (
        matrix + fx.Int64(row * fx.Int32(k) + work.lane) * fx.Int64(4) for matrix in (how.topk_ids, how.topk_weights)
    )
    store_if(mine, ids_at, good.select(chosen, fx.Int32(-1)))
    store_if(mine, weights_at, good.select(weight, fx.Float32(_NAN)))
