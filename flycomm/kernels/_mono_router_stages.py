# SPDX-License-Identifier: Apache-2.0
"""What :mod:`flycomm.kernels.mono_attention_out` adds to the shared stages: the router; then ``_mono_select_stages``.

Every block could compute the logits that it needs, all experts of a row, and spare a meeting of the blocks. But one
compute unit reads some 50 GB/s, all together a hundred times that: 256 experts of 7168 bf16 are 3.7 MB, 70 us for a
block and 1 us for the grid, against the few us that the meeting costs. So the work is dealt out, and finely: a tile is
a quarter of one expert's row, read before the wait by a group of lanes that then has few steps to do; by matrix
instructions, which take bf16, a quarter of the rows of sixteen experts, made by a block.
"""

from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx

from flycomm.channel import FRAGMENT_BYTES
from flycomm.dtypes import REDUCIBLE
from flycomm.kernels import _mono_work
from flycomm.kernels._mono_layer import DOT_ROWS
from flycomm.kernels._mono_products import by_matrix, over_turns
from flycomm.kernels._mono_stages import store_if
from flycomm.primitives.block_product import UNIT, BlockProduct, Source
from flycomm.primitives.block_rounds import first_weights
from flycomm.primitives.dot import Dot, load_ahead, of_lane, products
from flycomm.primitives.schedule import share

SLICES = 4  # of an expert's row: a logit's f32 parts are one fragment
SLICE_ELEMENTS = 8 * SLICES  # a row is a multiple of it: slices are whole fragments of bf16 and f32


@dataclass(frozen=True)
class Shape(_mono_work.Shape):
    experts: int
    top_k: int
    router: str  # a name of dtypes.REDUCIBLE

    @property
    def weighted_type(self) -> Any:
        return getattr(fx, REDUCIBLE[self.router].fx_name)

    @property
    def router_blocks(self) -> int:
        """How many blocks have a tile of the router: the first ones."""
        return -(-self.router_tiles // share(self.router_tiles, self.blocks))

    @property
    def router_by_matrix(self) -> bool:
        return self.matrix and self.router == "bf16"

    @property
    def router_tiles(self) -> int:
        """A slice of an expert, or of sixteen."""
        return (-(-self.experts // UNIT) if self.router_by_matrix else self.experts) * SLICES

    def parts(self) -> dict[str, int]:
        return super().parts() | {"logits": self.rows * self.experts * FRAGMENT_BYTES}  # (rows, experts, SLICES) f32


class Work(_mono_work.Work):
    """With the tiles of the router, a slice of one expert, and of the selection, a token row."""

    shape: Shape

    def __init__(self, shape: Shape, rows: Any, scratch: Any):
        super().__init__(shape, rows, scratch)
        self.logits = self.part("logits")
        self.wide, self.slice = (Dot(shape.hidden // parts, shape.weighted_type) for parts in (1, SLICES))
        self.products: list[BlockProduct] = [self.reduced] if shape.matrix else []
        if shape.router_by_matrix:
            self.routed = self.product(shape.hidden // SLICES, shape.router_tiles)
            self.products.append(self.routed)
        first = fx.Int32(fx.block_idx.x) * fx.Int32(share(shape.rows, shape.blocks))
        self.selects = first < rows  # whether this block has a row to select for

    def shift(self, tile: Any) -> Any:
        """Bytes from a row's begin to a tile's slice of it."""
        return fx.Int64(tile % fx.Int32(SLICES)) * fx.Int64(self.slice.row_bytes)

    def slice_of(self, row: Any, tile: Any) -> Any:
        """Address of a tile's slice of the row at ``row``."""
        return row + self.shift(tile)

    def router_rows(self, matrix: Any, turn: Any) -> list[Any]:
        """Address of the weights of a tile, the only one."""
        tile, _ = self.tile(self.shape.router_tiles, turn)
        return [self.slice_of(self.wide.row(matrix, tile // fx.Int32(SLICES)), tile)]

    def store_logit(self, row: Any, expert: Any, tile: Any, value: Any, inside: Any) -> None:
        """The part of a tile's slice."""
        part = expert * fx.Int32(SLICES) + tile % fx.Int32(SLICES)
        place = fx.Int64(row) * fx.Int64(self.shape.experts * SLICES) + fx.Int64(part)
        store_if(inside, self.logits + place * fx.Int64(4), value)


def router_ahead(work: Work, weights: Any) -> Any:
    """The first weights that :func:`route` multiplies."""
    if work.shape.router_by_matrix:
        return first_weights(work.routed, _router_source(work, weights))
    return load_ahead(work.slice, work.router_rows(weights, fx.Int32(0)), work.shape.ahead)


def _router_source(work: Work, weights: Any) -> Source:
    last = fx.Int32(work.shape.experts - 1)

    def row(unit: Any, i: Any) -> Any:
        expert = unit // fx.Int32(SLICES) * fx.Int32(UNIT) + i
        return work.slice_of(work.wide.row(weights, (expert < last).select(expert, last)), unit)

    return Source(row, lambda token: work.token(work.wide, work.weighted, token), work.shift)


def route(work: Work, weights: Any, ahead: Any, slots: Any) -> None:
    """A slice's part of the logits of the weighted rows, without the norm's factor, into ``work.logits``.

    By dot products in as many parts of the rows as it takes.
    """
    if work.shape.router_by_matrix:

        def store(within: Any, unit: Any, token: Any, i: Any, inside: Any) -> None:
            expert = unit // fx.Int32(SLICES) * fx.Int32(UNIT) + i
            value = work.routed.result(slots, within, token, i)
            work.store_logit(token, expert, unit, value, inside & (expert < fx.Int32(work.shape.experts)))

        by_matrix(work, work.routed, _router_source(work, weights), slots, ahead, UNIT, store)
        return
    tiles, parts = work.shape.router_tiles, -(-work.shape.rows // DOT_ROWS)

    def load(turn: Any) -> Any:
        return load_ahead(work.slice, work.router_rows(weights, turn // fx.Int32(parts)), work.shape.ahead)

    def one(turn: Any, loaded: Any, kept: Any) -> Any:
        turn, first = turn // fx.Int32(parts), turn % fx.Int32(parts) * fx.Int32(DOT_ROWS)
        tile, inside = work.tile(tiles, turn)
        rows = work.tokens(work.wide, work.weighted, first, min(work.shape.rows, DOT_ROWS))
        tokens = [work.slice_of(row, tile) for row in rows]
        sums = products(work.slice, work.router_rows(weights, turn), tokens, work.shape.ahead, loaded)
        value, row = of_lane(work.slice, [one[0] for one in sums]), first + work.lane
        inside = inside & (work.lane < fx.Int32(DOT_ROWS)) & (row < work.rows)
        work.store_logit(row, tile // fx.Int32(SLICES), tile, value, inside)
        return kept

    over_turns(work.turns(tiles) * parts, load, one, ahead)
