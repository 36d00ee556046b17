# SPDX-License-Identifier: Apache-2.0
"""What a block of a mono layer knows: numbers, where things lie, which tiles are its groups'.

Every mono layer has a projection whose sums are reduced over the ranks and then normed; a layer adds what comes before
and after it (``_mono_ffn_stages.py``, ``_mono_router_stages.py``).
"""

from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx

from flycomm.primitives import schedule
from flycomm.primitives.block_product import UNIT, BlockProduct
from flycomm.primitives.dot import GROUP, Dot
from flycomm.primitives.ready import MARK_BYTES

COLUMNS = 8  # of the reduced projection that a tile makes: a fragment of each row
HALVES = UNIT // COLUMNS  # fragments of a row that a unit makes
_LINE = 256  # bytes: parts of the scratch do not share a cache line


@dataclass(frozen=True)
class Shape:
    """Compile-time numbers, and the layout of the scratch."""

    hidden: int
    inner: int  # this rank's: the length of the rows that the reduced projection multiplies
    rows: int
    blocks: int
    threads: int
    matrix: bool  # by matrix instructions: a block makes a tile; else a group of 32 lanes does

    @property
    def groups(self) -> int:
        return self.threads // GROUP

    @property
    def fragments(self) -> int:
        """Of a row of ``hidden`` bf16; and tiles of the reduced projection."""
        return self.hidden // COLUMNS

    @property
    def ahead(self) -> int:
        """Fragments that a lane loads before a wait: a register quarter; less where sums need the registers."""
        return 16 if self.rows <= 4 else 8

    @property
    def weighted_type(self) -> Any:
        """Of the rows that wait for their norm's factor: what the next projection multiplies."""
        return fx.BFloat16

    def parts(self) -> dict[str, int]:
        """The scratch: name → bytes. Two marks a block, (rows, fragments) f32, (rows, hidden) ``weighted_type``."""
        return {
            "marks": 2 * self.blocks * MARK_BYTES,
            "squares": self.rows * self.fragments * 4,
            "weighted": self.rows * self.hidden * self.weighted_type.width // 8,
        }

    def place(self, name: str) -> int:
        """Where a part begins, in bytes."""
        at = 0
        for part, num_bytes in self.parts().items():
            if part == name:
                return at
            at += -(-num_bytes // _LINE) * _LINE
        raise KeyError(name)

    @property
    def num_bytes(self) -> int:
        last, num_bytes = list(self.parts().items())[-1]
        return self.place(last) + num_bytes


@dataclass(frozen=True)
class Owned:
    """A fragment of a (rows, hidden) matrix that a thread posts, takes and stores. i32; trace-time only."""

    row: Any
    tile: Any  # which fragment of the row
    index: Any  # of the matrix: the slot
    mine: Any  # bool: it exists, and is this thread's


class Work:
    """One block's part of the launch. Trace-time only: the tiles of this thread's group, and addresses (i64).

    By dot products lane ``r`` of a group stands for token row ``r`` wherever a tile's result is stored, posted or
    taken. Rows past ``rows`` (i32) are those of the last one: computed, and stored nowhere. ``owned``: this thread's
    fragments of the reduced rows, one a turn.
    """

    reduced: BlockProduct  # the reduced projection's, by matrix instructions

    def __init__(self, shape: Shape, rows: Any, scratch: Any):
        self.shape = shape
        self.rows = rows
        self.scratch = scratch
        self.group = fx.Int32(fx.thread_idx.x) // fx.Int32(GROUP)
        self.marks, self.squares, self.weighted = (self.part(name) for name in ("marks", "squares", "weighted"))
        self.partial = Dot(shape.inner, fx.BFloat16)
        self.lane = self.partial.lane
        self.present = self.lane < rows
        self.row = self.present.select(self.lane, fx.Int32(0))  # of this lane, or one that exists
        if shape.matrix:
            self.reduced = self.product(shape.inner, -(-shape.hidden // UNIT))
        self.owned = _owned_by_block(self) if shape.matrix else _owned_by_lanes(self)

    def part(self, name: str) -> Any:
        """Address of a part of the scratch."""
        return self.scratch + fx.Int64(self.shape.place(name))

    def product(self, length: int, units: int) -> BlockProduct:
        """Of ``units`` units of weight rows of ``length``, by matrix instructions."""
        shape = self.shape
        return BlockProduct(length, shape.rows, units, shape.blocks, shape.threads)

    def walk(self, tiles: int) -> list[Any]:
        return schedule.walk(tiles, self.shape.blocks, self.shape.groups, self.group)

    def token(self, dot: Dot, matrix: Any, row: Any) -> Any:
        """Address of token row ``row`` (i32) of the matrix at ``matrix``; of the last one where there are fewer."""
        return dot.row(matrix, (row < self.rows).select(row, self.rows - fx.Int32(1)))

    def tokens(self, dot: Dot, matrix: Any, first: Any = None, count: int = 0) -> list[Any]:
        """Of ``count`` rows from row ``first`` (i32) on; of all rows of the class."""
        each = [fx.Int32(t) for t in range(count or self.shape.rows)]
        return [self.token(dot, matrix, t if first is None else first + t) for t in each]

    def turns(self, tiles: int) -> int:
        return schedule.turns(tiles, self.shape.blocks, self.shape.groups)

    def tile(self, tiles: int, turn: Any) -> tuple[Any, Any]:
        """What :meth:`walk` gives for ``turn`` (i32)."""
        position = self.group + turn * fx.Int32(self.shape.groups)
        return schedule.own_tile(tiles, self.shape.blocks, position)

    def partial_rows(self, matrix: Any, turn: Any) -> list[Any]:
        """Addresses of the weight rows of a tile of the reduced projection."""
        tile, _ = self.tile(self.shape.fragments, turn)
        return [self.partial.row(matrix, tile * fx.Int32(COLUMNS) + fx.Int32(i)) for i in range(COLUMNS)]


def _owned(work: Work, row: Any, tile: Any, mine: Any) -> Owned:
    return Owned(row, tile, row * fx.Int32(work.shape.fragments) + tile, mine)


def _owned_by_lanes(work: Work) -> list[Owned]:
    walk = work.walk(work.shape.fragments)
    return [_owned(work, work.row, tile, inside & work.present) for tile, inside in walk]


def _owned_by_block(work: Work) -> list[Owned]:
    """Eight threads, whose columns make up a fragment, keep each other's in turn: see ``_mono_products.py``."""
    shape, product = work.shape, work.reduced
    steps = fragment_steps(work)
    owned = []
    for turn in range(-(-product.rounds * steps // COLUMNS)):
        place = fx.Int32(turn * COLUMNS) + fx.Int32(fx.thread_idx.x) % fx.Int32(COLUMNS)
        current, step = place // fx.Int32(steps), place % fx.Int32(steps)
        within, row, half, there = fragment_of(work, step)
        unit, inside = product.unit(current, within)
        tile = unit * fx.Int32(HALVES) + half
        mine = inside & there & (row < work.rows) & (tile < fx.Int32(shape.fragments))
        mine = mine & (current < fx.Int32(product.rounds))
        owned.append(_owned(work, mine.select(row, fx.Int32(0)), mine.select(tile, fx.Int32(0)), mine))
    return owned


def fragment_steps(work: Work) -> int:
    """How often a block makes fragments in a round of the reduced projection, eight threads each."""
    return -(-work.reduced.each * work.shape.rows * HALVES * COLUMNS // work.shape.threads)


def fragment_of(work: Work, step: Any) -> tuple[Any, Any, Any, Any]:
    """Which fragment this thread has a column of in ``step`` (i32): unit of the round, token row, half of the unit, and
    whether there is one; zeros if not."""
    of_unit = work.shape.rows * HALVES
    place = step * fx.Int32(work.shape.threads // COLUMNS) + fx.Int32(fx.thread_idx.x) // fx.Int32(COLUMNS)
    there = place < fx.Int32(work.reduced.each * of_unit)
    place = there.select(place, fx.Int32(0))
    rest = place % fx.Int32(of_unit)
    return place // fx.Int32(of_unit), rest // fx.Int32(HALVES), rest % fx.Int32(HALVES), there
