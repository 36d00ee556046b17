# SPDX-License-Identifier: Apache-2.0
"""A block's rows one after the other, where it may have several: first all are posted, then all are finished."""

from collections.abc import Callable, Sequence
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives.row import Rows

Load = Callable[[Any], Sequence[Any]]
"""``load(row)``: this thread's fragments of row ``row`` (i32), of ``rows.element``; past its end, anything."""


@flyc.jit
def post_rows(rows: Rows, load: Load, post: Callable[[Any, Any], None]) -> Any:
    """``post(row, load(row))`` for every row (i32) of the block, in order; returns the fragments of the first.

    These stay in registers for :func:`finish_rows`: with no more rows than blocks, as in decode, a row is loaded once.
    Of further ones, whose number no compiler knows, it loads again what then is in the caches. Zeros without a row.
    """
    first = [fx.Vector.filled(rows.per, 0.0, rows.element) for _ in rows.places]
    row = rows.block
    while row < rows.rows:
        own = load(row)
        post(row, own)
        begins = row == rows.block
        first = [begins.select(new, old) for new, old in zip(own, first, strict=True)]
        row = row + rows.blocks
    return first


@flyc.jit
def finish_rows(rows: Rows, first: Any, load: Load, body: Callable[[Any, Any, Any], None], turns: int) -> None:
    """``body(row, turn, own)`` for every row (i32) of the block, in order; ``own`` is ``first``, then ``load(row)``.

    ``turn`` (i32) begins at 0 and grows by ``turns``. ``load`` gives the bits that :func:`post_rows` posted.
    """
    row = rows.block
    turn = fx.Int32(0)
    own = first
    while row < rows.rows:
        body(row, turn, own)
        turn = turn + fx.Int32(turns)
        row = row + rows.blocks
        if row < rows.rows:
            own = load(row)
