# SPDX-License-Identifier: Apache-2.0
"""Scores of cached keys for an indexer's query rows, left in registers: for a kernel that stores them, or selects.

A group of lanes scores a step of keys (:mod:`flycomm.primitives.index_score_keys`) for the rows that its block staged
(:mod:`flycomm.primitives.index_score_query`), and hands each score over as ``emit(row, column, score, inside)``:
``row`` (i32) counts from the first staged row, ``column`` (i32) is a key or a block, ``score`` is f32; where ``inside``
is false there is nothing: a lane calls it anyway. Every lane of the warp calls all of this. ``emit`` may store, or
count the score in a histogram (:mod:`flycomm.primitives.select`), so that a selection starts while keys are read.

- :func:`score_tokens`, DSA: ``k_scale · Σ_h w[h] · relu(q[h]·k)``. Every lane gets the score of the key it owns.
- :func:`flycomm.primitives.index_score_blocks.score_block`, block-max: ``max over a block of 128 keys of (q·k) ·
  scale``, a row for each row × head.

Each bit of a score depends on its query, its weights and its key (or block) alone: heads are added in f32 in one order,
so neither the grid nor the page table, nor the rank that scores, nor what is scored beside it changes one. relu and
max keep a NaN. Nothing here orders memory; all of it may be captured.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives import matrix
from flycomm.primitives.index_score_keys import TILES
from flycomm.primitives.index_score_query import Query

BLOCK = 128  # keys that block-max takes the greatest of
DEVIATION = {"f32": 2.0**-19, "fp8": 2.0**-13}
"""How far a score of normally distributed queries and keys is from the exact one at most, by how products are summed,
as a part of ``k_scale · ‖k‖ · Σ_h |w[h]| · ‖q[h]‖`` (block-max: ``‖q‖ · ‖k‖ · scale``).

"fp8" is of sm_90's e4m3 matrix units, which keep 13 bits after a sum's first (``docs/indexer.md`` has the sources): of
each step's 32 products and the sum before them, what is below 2^-13 of the largest is cut off. In a model of that,
scores of 16 heads are 2^-16.5 off at most. A product far larger than its neighbours costs these more: up to 2^-6 of it.
Whole numbers are exact as long as sums stay under 2^14.
"""
Emit = Callable[[Any, Any, Any, Any], None]


def maximum(left: Any, right: Any) -> Any:
    """Of f32s; NaN if either is."""
    return fx.Float32(fx.arith.maximumf(left, right))


def products(query: Query, a: Sequence[Sequence[Any]], b: Sequence[Any]) -> list[Any]:
    """D of a tile of queries and a tile of keys."""
    return list(matrix.multiply(query.form, query.fmt.element, matrix.zeros(), a, b))


def _add_heads(query: Query, lane: Any, operands: Sequence[Any], sums: Sequence[Any], tile: Any) -> list[Any]:
    """``sums`` (a lane's columns of every tile of keys) and the heads of ``tile`` of the queries."""
    form = query.form
    a = query.operands(tile)
    weights = [query.weight(tile * fx.Int32(matrix.ROWS) + one) for one in form.rows_of(lane)]
    weight_of = {i: weights[group] for group, results in enumerate(form.by_row) for i in results}
    sums = list(sums)
    width = len(form.by_column)
    for tile_of_keys, b in enumerate(operands):
        results = products(query, a, b)
        for column, members in enumerate(form.by_column):
            place = tile_of_keys * width + column
            for i in members:
                sums[place] = fx.fma(weight_of[i], maximum(results[i], fx.Float32(0.0)), sums[place])
    return sums


def halve(lanes: int, lane: Any, distance: int, sums: Sequence[Any]) -> list[Any]:
    """Of sums that two lanes ``distance`` apart have parts of, the half that is this lane's: the upper lane's, the
    upper."""
    half = len(sums) // 2
    upper = (lane & fx.Int32(distance)) != fx.Int32(0)
    kept = [upper.select(sums[half + i], sums[i]) for i in range(half)]
    sent = [upper.select(sums[i], sums[half + i]) for i in range(half)]
    return [
        mine + fx.Float32(fx.gpu.shuffle_xor(other, distance, lanes)) for mine, other in zip(kept, sent, strict=True)
    ]


def _to_owners(form: matrix.Layout, lane: Any, sums: Sequence[Any]) -> Any:
    """Each key's sum over the lanes that have a part of it, in the lane that owns it."""
    for distance in form.column_distances:
        sums = halve(form.lanes, lane, distance, sums)
    return sums[0]


def _finish_row(query: Query, lane: Any, scales: Sequence[Any], sums: Any, row: Any, first: Any, emit: Emit) -> None:
    key = first + query.form.owned(lane)
    score = _to_owners(query.form, lane, sums)
    for scale in scales:
        score = score * scale
    emit(row, key, score, key < query.length(row))


@flyc.jit
def score_tokens(query: Query, operands: Any, scales: Any, first: Any, count: Any, emit: Emit) -> None:
    """Score the step at key ``first`` (i32) for ``count`` staged rows. A key is inside if the row sees it.

    ``operands``: by ``keys.operands`` of each loaded tile; ``scales``: what ``keys.load`` gave after the tiles, the f32
    scale of the key that this lane owns, or nothing. ``query.heads`` is a multiple of 16.
    """
    lane = query.form.lane()
    parts = fx.Int32(query.heads // matrix.ROWS)
    zeros = [fx.Float32(0.0) for _ in range(TILES * len(query.form.by_column))]
    sums, tile, row = zeros, fx.Int32(0), fx.Int32(0)
    while row < count:
        sums = _add_heads(query, lane, operands, sums, tile)
        tile = tile + fx.Int32(1)
        if tile == (row + fx.Int32(1)) * parts:
            _finish_row(query, lane, scales, sums, row, first, emit)
            sums, row = zeros, row + fx.Int32(1)
