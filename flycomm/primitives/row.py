# SPDX-License-Identifier: Apache-2.0
"""A row of a matrix in the registers of a block: its fragments and their slots.

Row ``i`` of a matrix of rows of ``hidden`` elements is block ``i % blocks``'s; thread ``t`` of it holds the fragments
``k * threads + t`` of the row, ``k`` below a compile-time ``each``. Slots are dealt out like those of a flat tensor:
thread ``t`` of block ``b`` has ``b * threads + t`` and every ``blocks * threads``-th after it, ``each`` of them a row.
So one channel serves rows and flat tensors of the same grid, and ``sentinel.meet`` is told ``first``, ``step`` and
``count`` as everywhere.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.channel import FRAGMENT_BYTES
from flycomm.primitives.access import load_fragment, store_fragment
from flycomm.primitives.call import Call


class Rows:
    """A block's rows of ``(rows, hidden)`` matrices of ``element``. Trace-time only.

    ``hidden`` (i32) is a whole number of fragments, at most ``each * threads`` of them; ``rows`` (i32). Matrices are
    contiguous and 16-byte aligned.
    """

    def __init__(self, rows: Any, hidden: Any, element: Any, each: int, blocks: int, threads: int):
        per = FRAGMENT_BYTES * 8 // element.width
        self.rows = rows
        self.element = element
        self.each = each
        self.threads = threads
        self.blocks = fx.Int32(blocks)
        self.block = fx.Int32(fx.block_idx.x)
        self.fragments = hidden // fx.Int32(per)
        self.places = [fx.Int32(fx.thread_idx.x) + fx.Int32(k * threads) for k in range(each)]
        self.inside = [place < self.fragments for place in self.places]
        self.first = self.block * fx.Int32(threads) + fx.Int32(fx.thread_idx.x)
        self.step = fx.Int32(blocks * threads)

    @property
    def count(self) -> Any:
        """This block's slots lie below it (i32): for ``sentinel.meet``."""
        mine = (self.rows - self.block + self.blocks - fx.Int32(1)) // self.blocks
        return mine * fx.Int32(self.each) * self.step

    def slots(self, row: Any) -> list[Any]:
        """The slots (i32) of this thread's fragments of row ``row`` (i32)."""
        turn = row // self.blocks * fx.Int32(self.each)
        return [self.first + (turn + fx.Int32(k)) * self.step for k in range(self.each)]

    def offsets(self, row: Any) -> list[Any]:
        """Where they lie, in fragments (i64) of a matrix; past the end of the row, where the row begins."""
        base = fx.Int64(row) * fx.Int64(self.fragments)
        return [
            base + fx.Int64(inside.select(place, fx.Int32(0)))
            for place, inside in zip(self.places, self.inside, strict=True)
        ]


def load_row(rows: Rows, address: Any, row: Any, element: Any = None) -> list[Any]:
    """This thread's fragments of row ``row`` (i32) of the matrix at ``address`` (i64); zeros past its end.

    ``element``: of this matrix, if it is wider than ``rows.element``; a vector has as many elements all the same.
    """
    element = element or rows.element
    halves = element.width // rows.element.width
    loaded = []
    for offset, inside in zip(rows.offsets(row), rows.inside, strict=True):
        base = address + offset * fx.Int64(FRAGMENT_BYTES * halves)
        parts = [load_fragment(base + fx.Int64(FRAGMENT_BYTES * half), element) for half in range(halves)]
        value = parts[0]
        if halves == 2:
            value = parts[0].shuffle(parts[1], list(range(2 * parts[0].numel)))
        loaded.append(inside.select(value, fx.Vector.filled(value.numel, 0.0, element)))
    return loaded


@flyc.jit
def if_inside(rows: Rows, each: Callable[[int], None]) -> None:
    """``each(k)`` for this thread's fragments ``k`` (compile-time ints) that are in the row."""
    inside = rows.inside
    for k in fx.range_constexpr(rows.each):
        if inside[k]:
            each(k)


def store_row(rows: Rows, address: Any, row: Any, values: Sequence[Any]) -> None:
    """Store this thread's fragments of row ``row`` (i32) of the matrix at ``address``; nothing past its end."""
    offsets = rows.offsets(row)
    if_inside(rows, lambda k: store_fragment(address + offsets[k] * fx.Int64(FRAGMENT_BYTES), values[k]))


def post_row(rows: Rows, call: Call, post: Callable[[Call, Any, Any], None], row: Any, values: Sequence[Any]) -> None:
    """``post(call, fragment, slot)`` of this thread's fragments of row ``row`` (i32)."""
    slots = rows.slots(row)
    if_inside(rows, lambda k: post(call, values[k], slots[k]))


@flyc.jit
def each_row(rows: Rows, body: Callable[[Any, Any], None], turns: int = 0) -> None:
    """``body(row, turn)`` for every row (i32) of the block; ``turn`` (i32) begins at 0 and grows by ``turns``."""
    row = rows.block
    turn = fx.Int32(0)
    while row < rows.rows:
        body(row, turn)
        turn = turn + fx.Int32(turns)
        row = row + rows.blocks
