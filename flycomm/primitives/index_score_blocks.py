# SPDX-License-Identifier: Apache-2.0
"""Block-max scores: the greatest of a block's products for each row × head. :mod:`flycomm.primitives.index_score`."""

from collections.abc import Sequence
from typing import Any

import flydsl.expr as fx

from flycomm.primitives import matrix
from flycomm.primitives.index_score import BLOCK, Emit, maximum, products
from flycomm.primitives.index_score_query import Query
from flycomm.primitives.norm import fold_lanes


class BlockRows:
    """What a lane knows of its rows × heads, the same for every block: made once after staging. Trace-time only.

    ``places``: which they are; ``lengths``: keys that they see; ``columns``: of a tile, those of the lane.
    """

    def __init__(self, query: Query, count: Any):
        form, lane = query.form, query.form.lane()
        tiles = range(query.tiles)
        self.places = [fx.Int32(tile * matrix.ROWS) + row for tile in tiles for row in form.rows_of(lane)]
        self.lengths = [self._length(query, place // fx.Int32(query.heads), count) for place in self.places]
        self.columns = form.columns_of(lane)

    def _length(self, query: Query, row: Any, count: Any) -> Any:
        there = row < count
        return there.select(query.length(there.select(row, fx.Int32(0))), fx.Int32(0))


def least(query: Query) -> list[Any]:
    """What a block begins with, for :func:`add_tile`."""
    return [fx.Float32(float("-inf")) for _ in range(query.tiles * len(query.form.by_row))]


def add_tile(
    query: Query, rows: BlockRows, a: Sequence[Any], b: Sequence[Any], first: Any, scale: Any, best: Sequence[Any]
) -> list[Any]:
    """``best``, and the tile of keys from ``first`` (i32) on; ``scale`` is f32. What a row does not see is left out.

    ``a``: ``query.operands`` of every tile; ``b``: ``keys.operands`` of the tile of keys.
    """
    form = query.form
    best = list(best)
    for tile, queries in enumerate(a):
        results = products(query, queries, b)
        for group, members in enumerate(form.by_row):
            place = tile * len(form.by_row) + group
            for i, column in zip(members, rows.columns, strict=True):
                seen = first + column < rows.lengths[place]
                best[place] = maximum(best[place], seen.select(results[i] * scale, fx.Float32(float("-inf"))))
    return best


def score_block(query: Query, rows: BlockRows, best: Sequence[Any], block: Any, emit: Emit) -> None:
    """Hand over the maxima of ``block`` (i32), all of whose tiles :func:`add_tile` has seen.

    ``emit``'s row is row × heads + head. Inside is one lane for each, if the row sees any key of the block.
    """
    width = query.form.row_width
    leads = query.form.lane() % fx.Int32(width) == fx.Int32(0)
    for place, value in enumerate(best):
        score = fold_lanes(value, width, maximum)
        emit(rows.places[place], block, score, leads & (block * fx.Int32(BLOCK) < rows.lengths[place]))
