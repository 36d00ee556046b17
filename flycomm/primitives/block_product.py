# SPDX-License-Identifier: Apache-2.0
"""Products of 1 to 48 token rows with rows of a weight matrix by matrix instructions: a block makes a *unit* at a time.

A unit is 16 weight rows. Its k is cut into up to 8 slices, by the length alone, which the block's groups of lanes take
in turn: so all warps of a block read one unit, and a stage needs no more units than blocks. A group walks a slice by
windows: in the place of a fragment of weights that it has multiplied it loads one of the window after, of the next
slice or unit at the end, so that as many are always on their way. A loaded fragment of weights serves all token rows,
one of a token row the whole unit. The slices' sums meet in shared memory, where they are added along one tree. What
:func:`flycomm.primitives.matrix.multiply` says of bits holds for whole sums: they depend on the length and the target,
and not on the grid, the block, the other rows or how many there are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import flydsl.expr as fx

from flycomm.channel import FRAGMENT_BYTES
from flycomm.primitives import matrix, schedule
from flycomm.primitives.access import load_fragment
from flycomm.primitives.block_scan import read, write
from flycomm.primitives.norm import add, fold

UNIT = 16  # weight rows
SHARED_BYTES = 32768  # for sums, at most: what a block may have without asking is 48 KiB on every target
_SLICES = 8
_WINDOW = 8  # segments of a weight row on their way: 32 registers for each tile of columns
_PITCH = UNIT + 4  # f32 from row to row of sums: rows that lanes store together are apart in banks


class Source(NamedTuple):
    """Where rows begin: traced i64 addresses, of traced i32."""

    weights: Callable[[Any, Any], Any]  # (unit, which of its 16 rows): the part that the unit multiplies
    tokens: Callable[[Any], Any]  # (token row, below the product's ``rows``)
    shift: Callable[[Any], Any] = lambda _: fx.Int64(0)  # (unit): bytes from there to the part that it multiplies


@dataclass(frozen=True)
class Item:
    """A slice of a unit: what a group of lanes does at a time. i32 and bools; trace-time only."""

    unit: Any
    inside: Any  # it is one of this block's, and busy
    busy: Any  # the slice is one of the unit's
    within: Any  # the unit's number in its round
    piece: Any
    first: Any  # segment


def window_of(segments: int) -> int:
    """Segments of a slice that are loaded at a time: few, and few too many at its end."""
    if segments <= _WINDOW:
        return segments
    return min(range(_WINDOW, _WINDOW // 2, -1), key=lambda one: -(-segments // one) * one)


class BlockProduct:
    """``units`` units over ``blocks`` blocks: rows of ``length`` bf16, a multiple of 8, for up to ``rows`` token rows.

    ``rounds``: how often the block makes ``each`` units together. Trace-time only."""

    def __init__(self, length: int, rows: int, units: int, blocks: int, threads: int):
        self.form = form = matrix.layout()
        self.rows, self.units, self.blocks = rows, units, blocks
        self.fragments = length * 2 // FRAGMENT_BYTES
        segments = -(-self.fragments // matrix.QUARTERS)
        self.slices = min(_SLICES, segments)
        self.segments = -(-segments // self.slices)  # of a slice
        self.window = window_of(self.segments)
        self.windows = -(-self.segments // self.window)
        self.whole = self.slices * self.windows * self.window * matrix.QUARTERS == self.fragments
        self.tiles, self.row_tiles = UNIT // form.columns, -(-rows // matrix.ROWS)
        self.slot = self.row_tiles * matrix.ROWS * _PITCH  # f32 of a slice
        self.tokens_ahead = min(self.window, self._tokens_ahead())
        self.groups = threads // form.lanes
        share, fit = schedule.share(units, blocks), SHARED_BYTES // (self.slices * self.slot * 4)
        self.each = max(1, min(self.groups // self.slices, share, fit))
        self.rounds = -(-share // self.each)
        self.turns = -(-self.each * self.slices // self.groups)
        lane = form.lane()
        self.group, self.column = fx.Int32(fx.thread_idx.x) // fx.Int32(form.lanes), form.column(lane)
        self.quarter, self.row_groups, self.column_groups = (
            form.quarter(lane),
            form.rows_of(lane),
            form.columns_of(lane),
        )

    def _tokens_ahead(self) -> int:  # segments on their way
        # A wave of AMD waits for loads in their order: if it has to for tokens, then for all weights loaded before.
        few = {1: _WINDOW, 2: _WINDOW // 2}.get(self.row_tiles, 2)  # a thread of NVIDIA has 255 registers
        return _WINDOW if self.form == matrix.WAVE else few

    @property
    def shared_bytes(self) -> int:
        """Of shared memory, for a round's sums; products that follow each other may have the same."""
        return self.each * self.slices * self.slot * 4

    def unit(self, current: Any, within: Any) -> tuple[Any, Any]:
        """The unit (i32) at ``within`` of round ``current``, and whether it is this block's; 0 if not."""
        return schedule.own_tile(self.units, self.blocks, current * fx.Int32(self.each) + within)

    def item(self, current: Any, turn: Any) -> Item:
        """This group's item of round ``current`` and ``turn``; past the last turn it is the next round's first."""
        over = turn == fx.Int32(self.turns)
        current = over.select(current + fx.Int32(1), current)
        place = over.select(fx.Int32(0), turn) * fx.Int32(self.groups) + self.group
        busy = place < fx.Int32(self.each * self.slices)
        place = busy.select(place, fx.Int32(0))
        within, piece = place // fx.Int32(self.slices), place % fx.Int32(self.slices)
        unit, inside = self.unit(current, within)
        return Item(unit, inside & busy, busy, within, piece, piece * fx.Int32(self.segments))

    def weight_rows(self, source: Source, item: Item) -> list[Any]:
        """Where this lane's quarter of the slice is in its weight row of each tile; all lanes' in one if not inside."""
        nowhere = source.weights(fx.Int32(0), fx.Int32(0))
        columns = [self.column + fx.Int32(tile * self.form.columns) for tile in range(self.tiles)]
        rows = [source.weights(item.unit, column) + self.offset(item.first) for column in columns]
        return [item.inside.select(row, nowhere) for row in rows]

    def offset(self, segment: Any) -> Any:
        """Bytes (i64) from a row's begin to this lane's quarter of ``segment``."""
        return fx.Int64(segment * fx.Int32(matrix.SEGMENT) + self.quarter * fx.Int32(FRAGMENT_BYTES))

    def load(self, address: Any, first: Any, at: Any, step: int, instead: Any) -> Any:
        """The fragment ``step`` segments after ``address``, which is segment ``at`` of the slice that begins at segment
        ``first``; zeros past the end of slice and row, for which ``instead`` is read."""
        if self.whole:
            return load_fragment(address + fx.Int64(step * matrix.SEGMENT), fx.Uint32)
        at = at + fx.Int32(step)
        place = (first + at) * fx.Int32(matrix.QUARTERS) + self.quarter
        there = (at < fx.Int32(self.segments)) & (place < fx.Int32(self.fragments))
        value = load_fragment(there.select(address + fx.Int64(step * matrix.SEGMENT), instead), fx.Uint32)
        return there.select(value, fx.Vector.filled(4, 0, fx.Uint32))

    def keep(self, slots: Any, item: Item, total: Sequence[Sequence[Any]]) -> None:
        """Store a slice's D of every tile."""
        form, base = self.form, (item.within * fx.Int32(self.slices) + item.piece) * fx.Int32(self.slot)
        for t, of_tiles in enumerate(total):
            for tile, result in enumerate(of_tiles):
                for row, members in zip(self.row_groups, form.by_row, strict=True):
                    for i, column in zip(members, self.column_groups, strict=True):
                        place = base + (row + fx.Int32(t * matrix.ROWS)) * fx.Int32(_PITCH)
                        write(slots, place + column + fx.Int32(tile * form.columns), result[i])

    def result(self, slots: Any, within: Any, row: Any, column: Any) -> Any:
        """The f32 of a token row and a ``column`` (i32) of the round's unit ``within``."""
        place = within * fx.Int32(self.slices * self.slot) + row * fx.Int32(_PITCH) + column
        return fold([read(slots, place + fx.Int32(i * self.slot), fx.Float32) for i in range(self.slices)], add)
