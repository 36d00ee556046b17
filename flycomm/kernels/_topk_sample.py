# SPDX-License-Identifier: Apache-2.0
"""The bound of ``topk_local``'s split kernel, from a sample of the row: what a candidate reaches."""

from collections.abc import Sequence
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.kernels._topk_finish import Rules, least
from flycomm.kernels._topk_plan import PER_THREAD
from flycomm.primitives.group_floor import greatest, halves_floor
from flycomm.primitives.rank import ordered_key, rank_of
from flycomm.primitives.score_row import ScoreRow, f32_bits, fold_ranks, load_whole, nothing
from flycomm.primitives.select import GROUP, Scratch, refine

_MARGIN = 16  # how many of the sample reach the bound, beyond one and a half times as many as are expected to


def sample_places(rules: Rules, score_row: ScoreRow) -> list[Any]:
    """Which units of the row are this thread's part of the sample: spread evenly, the same for all blocks.

    Lanes of a group have units that lie far apart.
    """
    units = max(1, PER_THREAD["sample"] // score_row.per_unit)
    available = fx.Int64(score_row.length // fx.Int32(score_row.per_unit))  # whole ones
    thread = fx.Int32(fx.thread_idx.x)
    place = thread % fx.Int32(GROUP) * fx.Int32(rules.threads // GROUP) + thread // fx.Int32(GROUP)
    mine = [place + fx.Int32(j * rules.threads) for j in range(units)]
    return [fx.Int32((fx.Int64(i) * available) // fx.Int64(units * rules.threads)) for i in mine]


def _is_long(rules: Rules, score_row: ScoreRow) -> Any:
    """Whether the row has more elements than there is room for candidates."""
    return score_row.length > fx.Int32(PER_THREAD["candidates"] * rules.threads)


@flyc.jit
def load_sample(rules: Rules, score_row: ScoreRow, at: Any) -> Any:
    """The units at ``at``; zeros where :func:`sampled_floor` looks at none."""
    units = [nothing(score_row) for _ in at]
    if _is_long(rules, score_row):
        units = load_whole(score_row, at)
    return units


def _best_sampled(score_row: ScoreRow, loaded: Sequence[Any], at: Sequence[Any]) -> Any:
    """The greatest rank of scores from all over the row: of a unit, whose scores may be alike, lanes take one each."""
    ranks = []
    for unit, place in zip(loaded, at, strict=True):
        for e, bits in enumerate(f32_bits(score_row, unit)):
            distance = e * (GROUP // score_row.per_unit)
            first = place
            if distance:
                bits, first = (fx.gpu.shuffle_xor(one, distance, GROUP) for one in (bits, place))
            index = fx.Int32(first) * fx.Int32(score_row.per_unit) + fx.Int32(e)
            ranks.append(rank_of(ordered_key(fx.Uint32(bits)), index, score_row.index_bits, score_row.low))
    return greatest(ranks)


def _of_threads(need: Any, threads: int) -> Any:
    """As how many of the threads' greatest (i32) to take ``need`` of the sample: at least as many threads have them.

    ``n`` of a sample are about ``threads * (1 - exp(-n / threads))`` threads'.
    """
    half = fx.Int32(threads // 2)
    beyond = half + (need - half) * fx.Int32(3) // fx.Int32(8)
    return fx.arith.min((need > half).select(beyond, need), fx.Int32(threads))


@flyc.jit
def sampled_floor(rules: Rules, scratch: Scratch, score_row: ScoreRow, loaded: Any, at: Any, k: Any) -> Any:
    """The rank that a candidate reaches: every element while the row is short, else by the sample.

    Of what a thread has of the sample only the greatest is looked at.
    """
    floor, threads = least(rules), rules.threads
    if _is_long(rules, score_row):
        samples = fx.Int32(PER_THREAD["sample"] * threads)
        expected = (k * samples + score_row.length - fx.Int32(1)) // score_row.length
        need = fx.Uint32(_of_threads(expected + expected // fx.Int32(2) + fx.Int32(_MARGIN), threads))
        best = _best_sampled(score_row, loaded, at)
        floor = halves_floor(best, need, rules.index_bits, scratch, threads)
        room, total = need + need // fx.Uint32(8), fx.Uint32(threads)
        floor = refine(fold_ranks([best]), total, floor, need, room, rules.index_bits, scratch, threads)
    return floor
