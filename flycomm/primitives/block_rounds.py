# SPDX-License-Identifier: Apache-2.0
"""The loops of :mod:`flycomm.primitives.block_product`: :func:`first_weights`, a wait, :func:`each_round`."""

from collections.abc import Callable, Sequence
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives import matrix
from flycomm.primitives.block_product import BlockProduct, Item, Source


def first_weights(product: BlockProduct, source: Source) -> list[list[Any]]:
    """The first window of weights of this group's first slice: ``window`` × ``tiles`` fragments, four registers each.

    For weights, which no kernel in flight writes: called before a wait, so that they travel meanwhile. Orders nothing.
    """
    item = product.item(fx.Int32(0), fx.Int32(0))
    rows, nowhere = product.weight_rows(source, item), source.weights(fx.Int32(0), fx.Int32(0))
    steps = range(product.window)
    return [[product.load(row, item.first, fx.Int32(0), step, nowhere) for row in rows] for step in steps]


@flyc.jit
def each_round(
    product: BlockProduct, source: Source, slots: Any, loaded: Any, finish: Callable[[Any, Any], Any], kept: Any
) -> Any:
    """Make every unit of this block; ``finish(round, kept)`` takes a round's results. Returns the last ``kept``.

    Called by every thread of the block. ``loaded``: by :func:`first_weights`. ``slots``: the pointer to
    ``product.shared_bytes`` of shared memory. In ``finish``, which is traced once, ``product.result`` reads results,
    and ``product.unit`` tells whose they are; ``kept`` is what it carries from round to round: a value, or a list.
    Two block barriers a round: one before ``finish``, one after. Reads the tokens with plain loads: what orders them,
    a wait, comes before it.
    """
    rows = _token_rows(product, source)
    held = _first_tokens(product, source, rows)
    current = fx.Int32(0)
    while current < fx.Int32(product.rounds):
        turn = fx.Int32(0)
        while turn < fx.Int32(product.turns):
            item, after = _item(product, current, turn), _item(product, current, turn + fx.Int32(1))
            total, loaded, held = _slice(product, source, item, after, rows, loaded, held)
            _keep(product, slots, item, total)
            turn = turn + fx.Int32(1)
        fx.gpu.barrier()
        kept = finish(current, kept)
        fx.gpu.barrier()
        current = current + fx.Int32(1)
    return kept


def _item(product: BlockProduct, current: Any, turn: Any) -> Item:
    return product.item(current, turn)


@flyc.jit
def _keep(product: BlockProduct, slots: Any, item: Item, total: Any) -> None:
    if item.busy:
        _store(product, slots, item, total)


def _store(product: BlockProduct, slots: Any, item: Item, total: Any) -> None:
    product.keep(slots, item, total)


def _token_rows(product: BlockProduct, source: Source) -> list[list[Any]]:
    """Address of every token row that this lane has a part of, by tile; None for rows of zeros."""
    last, tokens = fx.Int32(product.rows - 1), []
    for tile in range(product.row_tiles):
        firsts = [tile * matrix.ROWS + part * product.form.columns for part in range(product.form.parts)]
        places = [product.column + fx.Int32(first) for first in firsts]
        rows = [source.tokens((row < last).select(row, last)) for row in places]
        tokens.append([row if first < product.rows else None for first, row in zip(firsts, rows, strict=True)])
    return tokens


def _tokens(product: BlockProduct, rows: Sequence[Any], shift: Any, first: Any, at: Any, step: int) -> list[Any]:
    """A of every tile, ``step`` segments after segment ``at`` of the slice, which lies ``shift`` after rows' begins."""
    zeros = fx.Vector.filled(4, 0, fx.Uint32)

    def part(row: Any) -> Any:
        return zeros if row is None else product.load(row + shift, first, at, step, row)

    return [[part(row) for row in of_tile] for of_tile in rows]


def _first_tokens(product: BlockProduct, source: Source, rows: Sequence[Any]) -> list[Any]:
    item, zero = product.item(fx.Int32(0), fx.Int32(0)), fx.Int32(0)
    shift = source.shift(item.unit) + product.offset(item.first)
    return [_tokens(product, rows, shift, item.first, zero, step) for step in range(product.tokens_ahead)]


@flyc.jit
def _slice(product: BlockProduct, source: Source, item: Item, after: Item, tokens: Any, loaded: Any, held: Any) -> Any:
    """D of a slice for every tile, and the first window of the item ``after``, weights and tokens."""
    here, following = Place(product, source, item), Place(product, source, after)
    total = [[matrix.zeros() for _ in range(product.tiles)] for _ in range(product.row_tiles)]
    window = fx.Int32(0)
    while window < fx.Int32(product.windows):
        total, loaded, held = _window(product, source, here, following, tokens, window, total, loaded, held)
        window = window + fx.Int32(1)
    return total, loaded, held


class Place:
    """Where a slice lies: its weight rows, its shift in every token row, its first segment. Trace-time only."""

    def __init__(self, product: BlockProduct, source: Source, item: Item):
        self.rows = product.weight_rows(source, item)
        self.shift = source.shift(item.unit) + product.offset(item.first)
        self.first = item.first


def _window(
    product: BlockProduct,
    source: Source,
    here: Place,
    following: Place,
    tokens: Sequence[Any],
    window: Any,
    total: Sequence[Sequence[Any]],
    loaded: Sequence[Sequence[Any]],
    held: Sequence[Any],
) -> tuple[list[Any], list[Any], list[Any]]:
    """Multiply a window; load in its place the one after, of this slice or of the ``following`` one."""
    wide, nothing = fx.Int32(product.window), source.weights(fx.Int32(0), fx.Int32(0))
    last = window == fx.Int32(product.windows - 1)
    at, ahead = window * wide, last.select(fx.Int32(0), (window + fx.Int32(1)) * wide)
    first, moved = last.select(following.first, here.first), fx.Int64(ahead * fx.Int32(matrix.SEGMENT))
    begins = [last.select(other, row) + moved for row, other in zip(here.rows, following.rows, strict=True)]
    shift_here = here.shift + fx.Int64(at * fx.Int32(matrix.SEGMENT))
    shift_ahead = last.select(following.shift, here.shift) + moved
    result, made, coming = [list(of_tiles) for of_tiles in total], [], list(held)
    for step in range(product.window):
        b = [matrix.prepare(matrix.BF16, fragment) for fragment in loaded[step]]
        for t, parts in enumerate(coming[step]):
            a = [matrix.prepare(matrix.BF16, part) for part in parts]
            for tile, fragment in enumerate(b):
                result[t][tile] = matrix.multiply(product.form, matrix.BF16, list(result[t][tile]), [a], [fragment])
        made.append([product.load(begin, first, ahead, step, nothing) for begin in begins])
        later = step + product.tokens_ahead
        if later < product.window:
            coming.append(_tokens(product, tokens, shift_here, here.first, at, later))
        else:
            coming.append(_tokens(product, tokens, shift_ahead, first, ahead, later - product.window))
    return result, made, coming[product.window :]
