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

    ``hidden`` (i32, or a compile-time int, which saves looking where a row ends) is a whole number of fragments, at
    most ``each * threads`` of them; ``rows`` (i32). Matrices are contiguous and 16-byte aligned. ``single``: there are
    no more rows than blocks, so a block has ``row``, or none, and then ``row`` is 0.
    """

    def __init__(
        self, rows: Any, hidden: Any, element: Any, each: int, blocks: int, threads: int, single: bool = False
    ):
        self.per = FRAGMENT_BYTES * 8 // element.width  # elements of a fragment
        self.rows = rows
        self.single = single
        self.element = element
        self.each = each
        self.threads = threads
        self.blocks = fx.Int32(blocks)
        self.block = fx.Int32(fx.block_idx.x)
        exact = hidden // self.per if isinstance(hidden, int) else 0
        self.fragments = fx.Int32(exact) if exact else hidden // fx.Int32(self.per)
        self.row_bytes = fx.Int64(self.fragments) * fx.Int64(FRAGMENT_BYTES)
        self.places = [fx.Int32(fx.thread_idx.x) + fx.Int32(k * threads) for k in range(each)]
        self.inside = [
            fx.Boolean(True) if (k + 1) * threads <= exact else place < self.fragments
            for k, place in enumerate(self.places)
        ]
        self.mine = self.block < rows
        self.row = self.mine.select(self.block, fx.Int32(0)) if single else self.block
        at_hand = [inside & self.mine for inside in self.inside] if single else self.inside
        self.near = [here.select(place, fx.Int32(0)) for here, place in zip(at_hand, self.places, strict=True)]
        self.first = self.block * fx.Int32(threads) + fx.Int32(fx.thread_idx.x)
        self.step = fx.Int32(blocks * threads)

    @property
    def count(self) -> Any:
        """This block's slots lie below it (i32): for ``sentinel.meet``."""
        if self.single:
            return self.mine.select(fx.Int32(self.each) * self.step, fx.Int32(0))
        mine = (self.rows - self.block + self.blocks - fx.Int32(1)) // self.blocks
        return mine * fx.Int32(self.each) * self.step

    def slots(self, row: Any) -> list[Any]:
        """The slots (i32) of this thread's fragments of row ``row`` (i32)."""
        turn = fx.Int32(0) if self.single else row // self.blocks * fx.Int32(self.each)
        return [self.first + (turn + fx.Int32(k)) * self.step for k in range(self.each)]

    def offsets(self, row: Any) -> list[Any]:
        """Where they lie, in fragments (i64) of a matrix; past the end of the row, where the row begins."""
        base = fx.Int64(row) * fx.Int64(self.fragments)
        return [base + fx.Int64(place) for place in self.near]


def load_places(rows: Rows, base: Any, element: Any = None) -> list[Any]:
    """This thread's fragments of the row that begins at ``base`` (i64); past its end, those with which it begins.

    ``element``: of this row, if it is wider than ``rows.element``; a vector has as many elements all the same.
    """
    element = element or rows.element
    size = FRAGMENT_BYTES * element.width // rows.element.width
    loaded = []
    for place in rows.near:
        at = base + fx.Int64(place) * fx.Int64(size)
        parts = [load_fragment(at + fx.Int64(part), element) for part in range(0, size, FRAGMENT_BYTES)]
        loaded.append(parts[0].shuffle(parts[1], list(range(rows.per))) if len(parts) == 2 else parts[0])
    return loaded


def load_row(rows: Rows, address: Any, row: Any, element: Any = None) -> list[Any]:
    """This thread's fragments of row ``row`` (i32) of the matrix at ``address`` (i64), as :func:`load_places`."""
    size = rows.row_bytes * fx.Int64((element or rows.element).width // rows.element.width)
    return load_places(rows, address + fx.Int64(row) * size, element)


def zero_past_the_end(rows: Rows, values: Sequence[Any]) -> list[Any]:
    zero = fx.Vector.filled(values[0].numel, 0.0, values[0].dtype)
    return [inside.select(value, zero) for inside, value in zip(rows.inside, values, strict=True)]


@flyc.jit
def if_mine(rows: Rows, body: Callable[[], None]) -> None:
    """``body()`` in blocks that have a row; of ``single`` rows."""
    if rows.mine:
        body()


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
