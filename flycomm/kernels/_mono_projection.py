# SPDX-License-Identifier: Apache-2.0
"""A projection that waits for nobody and for which nobody waits: what a mono layer's blocks do while words travel.

``result = round(x @ weights.T)``: ``x`` (rows, inner), ``weights`` (out, inner), ``result`` (rows, out), bf16. A tile
is eight columns of each row, or four of more than eight rows, by a group of 32 lanes, and dealt out over all blocks.
"""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives import schedule
from flycomm.primitives.access import store_element
from flycomm.primitives.dot import GROUP, Dot, load_ahead, of_lane, products

COLUMNS = 8  # that a result's row is a multiple of


class Projection:
    """This block's tiles. Trace-time only: addresses are i64, ``rows`` (i32) is at most ``most``, others are ints."""

    def __init__(
        self, inner: int, out: int, most: int, blocks: int, threads: int, rows: Any, x: Any, weights: Any, result: Any
    ):
        self.dot = Dot(inner, fx.BFloat16)
        self.out, self.rows, self.weights, self.result = out, rows, weights, result
        self.columns = COLUMNS if most <= 8 else COLUMNS // 2  # a sum a row and column is kept in registers
        self.fragments = 16 if most <= 4 else 8  # that a lane loads ahead
        last = rows - fx.Int32(1)
        each = [fx.Int32(t) for t in range(most)]
        self.tokens = [self.dot.row(x, (t < rows).select(t, last)) for t in each]
        group = fx.Int32(fx.thread_idx.x) // fx.Int32(GROUP)
        self.tiles = schedule.walk(out // self.columns, blocks, threads // GROUP, group)

    def _rows_of(self, turn: int) -> list[Any]:
        tile, _ = self.tiles[turn]
        first = tile * fx.Int32(self.columns)
        return [self.dot.row(self.weights, first + fx.Int32(i)) for i in range(self.columns)]

    def ahead(self) -> Any:
        """The first weights, to be on their way while the block waits."""
        return load_ahead(self.dot, self._rows_of(0), self.fragments)

    def make(self, ahead: Any) -> None:
        """All tiles of the block; ``ahead`` by :meth:`ahead`. Every thread calls it."""
        for turn, (tile, inside) in enumerate(self.tiles):
            loaded = None if turn else ahead
            sums = products(self.dot, self._rows_of(turn), self.tokens, self.fragments, loaded)
            columns = [of_lane(self.dot, [row[i] for row in sums]) for i in range(self.columns)]
            value = fx.Vector.from_elements(columns, fx.Float32).to(fx.BFloat16).bitcast(fx.Uint32)
            _store(self, tile, inside, [value[i] for i in range(self.columns // 2)])


@flyc.jit
def _store(one: Projection, tile: Any, inside: Any, words: Any) -> None:
    """Lane ``r`` has what is of token row ``r``, two columns a word."""
    if inside & (one.dot.lane < one.rows):
        place = fx.Int64(one.dot.lane) * fx.Int64(one.out // one.columns) + fx.Int64(tile)
        for i in fx.range_constexpr(len(words)):
            store_element(one.result + (place * fx.Int64(len(words)) + fx.Int64(i)) * fx.Int64(4), words[i])
