# SPDX-License-Identifier: Apache-2.0
"""What a block of :mod:`flycomm.kernels.mono_ffn` knows: numbers, where things lie, which tiles are its groups'."""

from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx

from flycomm.primitives import schedule
from flycomm.primitives.dot import GROUP, Dot
from flycomm.primitives.ready import MARK_BYTES

COLUMNS = 8  # of the down projection that a tile makes: a fragment of each row
_LINE = 256  # bytes: parts of the scratch do not share a cache line


@dataclass(frozen=True)
class Shape:
    """Compile-time numbers, and the layout of the scratch in bytes."""

    hidden: int
    inter: int
    out: int
    rows: int
    blocks: int
    threads: int

    @property
    def groups(self) -> int:
        return self.threads // GROUP

    @property
    def fragments(self) -> int:
        return self.hidden // COLUMNS

    @property
    def ahead(self) -> int:
        """Fragments that a lane loads before a wait: a register quarter; less where sums need the registers."""
        return 16 if self.rows <= 4 else 8

    @property
    def squares(self) -> int:
        """(rows, fragments) f32."""
        return -(-2 * self.blocks * MARK_BYTES // _LINE) * _LINE

    @property
    def act(self) -> int:
        """(rows, inter) bf16."""
        return self.squares + -(-self.rows * self.fragments * 4 // _LINE) * _LINE

    @property
    def weighted(self) -> int:
        """(rows, hidden) bf16."""
        return self.act + -(-self.rows * self.inter * 2 // _LINE) * _LINE

    @property
    def num_bytes(self) -> int:
        return self.weighted + self.rows * self.hidden * 2


class Work:
    """One block's part of the launch. Trace-time only: the tiles of this thread's group, and addresses (i64).

    Lane ``r`` of a group stands for token row ``r`` wherever a tile's result is stored, posted or taken. Rows past
    ``rows`` (i32) are those of the last one: computed, and stored nowhere but in the scratch.
    """

    def __init__(self, shape: Shape, rows: Any, scratch: Any):
        self.shape = shape
        self.rows = rows
        self.group = fx.Int32(fx.thread_idx.x) // fx.Int32(GROUP)
        self.marks = scratch
        self.squares = scratch + fx.Int64(shape.squares)
        self.act = scratch + fx.Int64(shape.act)
        self.weighted = scratch + fx.Int64(shape.weighted)
        self.wide, self.down = Dot(shape.hidden, fx.BFloat16), Dot(shape.inter, fx.BFloat16)
        self.projection = self.wide
        self.lane = self.wide.lane
        self.present = self.lane < rows
        self.row = self.present.select(self.lane, fx.Int32(0))  # of this lane, or one that exists
        self.gate_up_tiles = self._walk(shape.inter)
        self.down_tiles = self._walk(shape.fragments)
        self.projection_tiles = self._walk(shape.out // 2)

    def _walk(self, tiles: int) -> list[Any]:
        return schedule.walk(tiles, self.shape.blocks, self.shape.groups, self.group)

    def tokens(self, dot: Dot, matrix: Any) -> list[Any]:
        """Addresses of the token rows of the matrix at ``matrix``; of the last one where there are fewer."""
        last = self.rows - fx.Int32(1)
        each = [fx.Int32(t) for t in range(self.shape.rows)]
        return [dot.row(matrix, (t < self.rows).select(t, last)) for t in each]

    def down_rows(self, matrix: Any, turn: int) -> list[Any]:
        tile, _ = self.down_tiles[turn]
        return [self.down.row(matrix, tile * fx.Int32(COLUMNS) + fx.Int32(i)) for i in range(COLUMNS)]

    def projection_rows(self, matrix: Any, turn: int) -> list[Any]:
        tile, _ = self.projection_tiles[turn]
        return [self.projection.row(matrix, tile * fx.Int32(2) + fx.Int32(i)) for i in range(2)]

    def fragment_of(self, turn: int) -> Any:
        """Which fragment (i32) of a (rows, hidden) matrix is this lane's."""
        tile, _ = self.down_tiles[turn]
        return self.row * fx.Int32(self.shape.fragments) + tile

    def mine(self, turn: int) -> Any:
        """Whether this lane has a fragment of a row in this turn."""
        _, inside = self.down_tiles[turn]
        return inside & self.present
