# SPDX-License-Identifier: Apache-2.0
"""DSA scores of e4m3 keys by groups of four warps: :mod:`flycomm.primitives.index_score`, by the larger tile product.

A group scores a step of 64 keys, several query rows a product (:mod:`flycomm.primitives.warpgroup`). A lane has two
keys' results of a quarter of the heads, adds those of a row, and the four lanes of a key exchange halves: even lanes
own the first key, odd ones the second.

Heads are added in f32 in one order, as there: no bit of a score depends on what is scored beside it. But products are
summed as the target's ``multiply_group`` does it: :data:`flycomm.primitives.index_score.DEVIATION`, ``"fp8"``.
"""

from collections.abc import Sequence
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives import matrix, warpgroup
from flycomm.primitives.index_score import Emit, halve
from flycomm.primitives.index_score_keys import Keys
from flycomm.primitives.index_score_warpgroup_query import SIXTEEN, GroupQuery
from flycomm.primitives.warpgroup import HALVES, ROWS, THREADS


class _Form:
    """A step of 64 keys, spread over the group: what :class:`Keys` asks of a :class:`matrix.Layout`."""

    lanes = ROWS  # keys of a step
    columns = 8  # keys between a lane's two

    def lane(self) -> Any:
        return fx.Int32(fx.thread_idx.x) % fx.Int32(THREADS)

    def column(self, lane: Any) -> Any:
        return warpgroup.row_of(lane)

    def quarter(self, lane: Any) -> Any:
        return lane % fx.Int32(matrix.QUARTERS)

    def owned(self, lane: Any) -> Any:
        return warpgroup.row_of(lane) + lane % fx.Int32(HALVES) * fx.Int32(self.columns)


class GroupKeys(Keys):
    """Keys as a group of four warps loads them."""

    tiles = HALVES

    def __init__(self, cache: Any, table: Any, length: Any):
        super().__init__(cache, _Form(), table, length)

    def operands(self, loaded: Sequence[Any]) -> list[Any]:
        """As they were loaded."""
        return list(loaded)


@flyc.jit
def score_group(query: GroupQuery, a: Any, scales: Any, first: Any, count: Any, emit: Emit) -> None:
    """As :func:`flycomm.primitives.index_score.score_tokens`, of 64 keys from ``first`` (i32) on."""
    for row in fx.range_constexpr(0, query.rows, query.at_once):
        if fx.Int32(row) < count:
            _score_rows(query, a, scales, first, fx.Int32(row), emit)


def _score_rows(query: GroupQuery, a: Any, scales: Any, first: Any, row: Any, emit: Emit) -> None:
    rows, heads = query.at_once, query.heads
    place = row * fx.Int32(heads)
    results = warpgroup.multiply_group(query.words(), place, rows * heads, a)
    sums = [fx.Float32(0.0) for _ in range(HALVES * rows)]  # of the first key, then of the second
    for part in range(rows * heads // SIXTEEN):
        weights = query.weights_of(place + fx.Int32(part * SIXTEEN))
        for i in range(4):
            for half in range(HALVES):
                value = _twice_relu(results[8 * part + i // 2 * 4 + half * 2 + i % 2])
                one = half * rows + part * SIXTEEN // heads
                sums[one] = fx.fma(weights[i], value, sums[one])
    _finish(query, sums, scales, first, row, emit)


def _twice_relu(value: Any) -> Any:
    """Of a finite f32 or a NaN: an addition costs NVIDIA GPUs half of what a maximum does."""
    size = (fx.Float32(value).bitcast(fx.Uint32) & fx.Uint32(0x7FFFFFFF)).bitcast(fx.Float32)
    return value + size


def _finish(query: GroupQuery, sums: Any, scales: Any, first: Any, row: Any, emit: Emit) -> None:
    """The lane's last two bits: which key, and which half of the rows; of a single row, who does not emit."""
    lane, form = query.form.lane(), _Form()
    sums = halve(query.form.lanes, lane, 1, sums)
    upper = lane // fx.Int32(2) % fx.Int32(2)
    if len(sums) > 1:
        row, alone = row + upper * fx.Int32(len(sums) // 2), None
        sums = halve(query.form.lanes, lane, 2, sums)
    else:
        sums, alone = [sums[0] + fx.Float32(fx.gpu.shuffle_xor(sums[0], 2, form.columns * 4))], upper == fx.Int32(0)
    key = first + form.owned(form.lane())
    for i, score in enumerate(sums):
        for scale in scales:
            score = score * scale
        inside = key < query.length(row + fx.Int32(i))
        emit(row + fx.Int32(i), key, score, inside if alone is None else inside & alone)
