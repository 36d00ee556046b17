# SPDX-License-Identifier: Apache-2.0
"""What :mod:`flycomm.kernels.mono_ffn` adds to the shared stages: gate and up before, the next projection after."""

from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx

from flycomm.kernels import _mono_work
from flycomm.kernels._mono_products import by_matrix, over_turns
from flycomm.kernels._mono_stages import factor, store_if
from flycomm.primitives.activation import silu
from flycomm.primitives.block_product import UNIT, BlockProduct, Source
from flycomm.primitives.block_rounds import first_weights
from flycomm.primitives.call import Call
from flycomm.primitives.dot import Dot, load_ahead, of_lane, products

PAIRS = UNIT // 2  # columns of gate, and as many of up, in a unit


@dataclass(frozen=True)
class Shape(_mono_work.Shape):
    """``inner`` is the layer's ``inter``."""

    out: int

    def parts(self) -> dict[str, int]:
        return super().parts() | {"act": self.rows * self.inner * 2}  # (rows, inter) bf16


class Work(_mono_work.Work):
    """With the tiles of gate and up, one column of both, and of the next projection, two columns. By matrix
    instructions: units of eight columns of both, and of sixteen."""

    shape: Shape

    def __init__(self, shape: Shape, rows: Any, scratch: Any):
        super().__init__(shape, rows, scratch)
        self.act = self.part("act")
        self.wide = Dot(shape.hidden, fx.BFloat16)
        self.products: list[BlockProduct] = []
        if shape.matrix:
            units = shape.inner // PAIRS, -(-shape.out // UNIT)
            self.gate_up, self.projected = (self.product(shape.hidden, one) for one in units)
            self.products = [self.gate_up, self.reduced, self.projected]

    def pair(self, matrix: Any, tile: Any) -> list[Any]:
        """Addresses of the rows of gate and up of a column."""
        return [self.wide.row(matrix, tile), self.wide.row(matrix, tile + fx.Int32(self.shape.inner))]

    def projection_rows(self, matrix: Any, turn: Any) -> list[Any]:
        tile, _ = self.tile(self.shape.out // 2, turn)
        return [self.wide.row(matrix, tile * fx.Int32(2) + fx.Int32(i)) for i in range(2)]


def _store(matrix: Any, width: int, row: Any, column: Any, value: Any, inside: Any) -> None:
    place = fx.Int64(row) * fx.Int64(width) + fx.Int64(column)
    store_if(inside, matrix + place * fx.Int64(2), value.to(fx.BFloat16))


def gate_up(work: Work, x: Any, weights: Any, slots: Any) -> None:
    """SiLU(gate) * up into ``work.act``."""
    if work.shape.matrix:
        _gate_up_by_matrix(work, x, weights, slots)
        return
    tokens, tiles = work.tokens(work.wide, x), work.shape.inner

    def ahead(turn: Any) -> Any:
        return load_ahead(work.wide, work.pair(weights, work.tile(tiles, turn)[0]), work.shape.ahead)

    def one(turn: Any, loaded: Any, kept: Any) -> Any:
        tile, inside = work.tile(tiles, turn)
        both = products(work.wide, work.pair(weights, tile), tokens, work.shape.ahead, loaded)
        gate, up = (of_lane(work.wide, [row[i] for row in both]) for i in range(2))
        _store(work.act, tiles, work.row, tile, silu(gate) * up, inside & work.present)
        return kept

    over_turns(work.turns(tiles), ahead, one, ahead(fx.Int32(0)))


def _gate_up_by_matrix(work: Work, x: Any, weights: Any, slots: Any) -> None:
    product = work.gate_up

    def row(unit: Any, i: Any) -> Any:
        of_up = i // fx.Int32(PAIRS) * fx.Int32(work.shape.inner)
        return work.wide.row(weights, unit * fx.Int32(PAIRS) + i % fx.Int32(PAIRS) + of_up)

    def store(within: Any, unit: Any, token: Any, column: Any, inside: Any) -> None:
        gate, up = (product.result(slots, within, token, column + fx.Int32(i * PAIRS)) for i in range(2))
        place = unit * fx.Int32(PAIRS) + column
        _store(work.act, work.shape.inner, token, place, silu(gate) * up, inside)

    source = Source(row, lambda token: work.token(work.wide, x, token))
    by_matrix(work, product, source, slots, first_weights(product, source), PAIRS, store)


def projection_ahead(work: Work, weights: Any) -> Any:
    """The first weights that :func:`project` multiplies, before the wait for its inputs."""
    if work.shape.matrix:
        return first_weights(work.projected, _projection_source(work, weights))
    return load_ahead(work.wide, work.projection_rows(weights, fx.Int32(0)), work.shape.ahead)


def _projection_source(work: Work, weights: Any) -> Source:
    last = fx.Int32(work.shape.out - 1)

    def row(unit: Any, i: Any) -> Any:
        place = unit * fx.Int32(UNIT) + i
        return work.wide.row(weights, (place < last).select(place, last))

    return Source(row, lambda token: work.token(work.wide, work.weighted, token))


def project(work: Work, call: Call, weights: Any, ahead: Any, scales: Any, out: Any, slots: Any) -> None:
    """The next projection of the weighted rows, times each row's factor; NaN if the call failed."""
    width = work.shape.out
    if work.shape.matrix:

        def store(within: Any, unit: Any, token: Any, i: Any, inside: Any) -> None:
            column = unit * fx.Int32(UNIT) + i
            value = work.projected.result(slots, within, token, i) * factor(call, scales, token)
            _store(out, width, token, column, value, inside & (column < fx.Int32(width)))

        by_matrix(work, work.projected, _projection_source(work, weights), slots, ahead, UNIT, store)
        return
    tokens, scale = work.tokens(work.wide, work.weighted), factor(call, scales, work.row)

    def load(turn: Any) -> Any:
        return load_ahead(work.wide, work.projection_rows(weights, turn), work.shape.ahead)

    def one(turn: Any, loaded: Any, kept: Any) -> Any:
        both = products(work.wide, work.projection_rows(weights, turn), tokens, work.shape.ahead, loaded)
        tile, inside = work.tile(width // 2, turn)
        for i in range(2):
            value = of_lane(work.wide, [row[i] for row in both]) * scale
            _store(out, width, work.row, tile * fx.Int32(2) + fx.Int32(i), value, inside & work.present)
        return kept

    over_turns(work.turns(width // 2), load, one, ahead)
