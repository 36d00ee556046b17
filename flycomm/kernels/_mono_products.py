# SPDX-License-Identifier: Apache-2.0
"""How mono layers multiply: tiles by dot products in turns, or units by matrix instructions in rounds.

And the projection that is reduced, either way.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.kernels._mono_work import COLUMNS, Work, fragment_of, fragment_steps
from flycomm.primitives.block_product import UNIT, BlockProduct, Source
from flycomm.primitives.block_rounds import each_round, first_weights
from flycomm.primitives.block_scan import group_value
from flycomm.primitives.dot import load_ahead, of_lane, products


def over_turns(
    turns: int, load: Callable[[Any], Any], body: Callable[[Any, Any, Any], Any], loaded: Any, kept: Any = None
) -> Any:
    """``kept = body(turn, loaded, kept)`` for every ``turn`` (i32), and the next turn's ``load(turn)`` after it.

    A loop on the device, so that code and registers are those of one turn. ``loaded``: ``load`` of turn 0.
    """
    kept = fx.Int32(0) if kept is None else kept
    if turns == 1:
        return body(fx.Int32(0), loaded, kept)
    return _loop(turns, load, body, loaded, kept)


def in_turns(turns: int, body: Callable[[Any, Any, Any], Any]) -> None:
    """:func:`over_turns` of what loads nothing ahead, and keeps nothing."""
    over_turns(turns, lambda turn: turn, body, fx.Int32(0))


@flyc.jit
def _loop(turns: int, load: Callable[[Any], Any], body: Callable[[Any, Any, Any], Any], loaded: Any, kept: Any) -> Any:
    turn = fx.Int32(0)
    while turn < fx.Int32(turns):
        kept = body(turn, loaded, kept)
        turn = turn + fx.Int32(1)
        if turn < fx.Int32(turns):
            loaded = load(turn)
    return kept


def shared_sums(shared: Any, products: Sequence[BlockProduct]) -> Any:
    """Shared memory for each of ``products`` in turn; None if there are none."""
    if not products:
        return None
    floats = max(one.shared_bytes for one in products) // 4
    return shared.allocate(fx.Array[fx.Float32, floats]).peek().ptr


def by_matrix(
    work: Work,
    product: BlockProduct,
    source: Source,
    slots: Any,
    ahead: Any,
    columns: int,
    body: Callable[[Any, Any, Any, Any, Any], None],
) -> None:
    """All rounds of a product: ``body(within, unit, row, column, inside)``, i32 and a bool, for this thread's results.

    A unit gives ``columns`` (at most 16) of each token row; neighbours in a row are neighbouring threads'. ``ahead``:
    by ``first_weights``.
    """

    def finish(current: Any, kept: Any) -> Any:
        _each_result(work, product, columns, current, body)
        return kept

    each_round(product, source, slots, ahead, finish, fx.Int32(0))


def _each_result(
    work: Work, product: BlockProduct, columns: int, current: Any, body: Callable[[Any, Any, Any, Any, Any], None]
) -> None:
    of_unit = work.shape.rows * columns
    for step in range(-(-product.each * of_unit // work.shape.threads)):
        place = fx.Int32(fx.thread_idx.x) + fx.Int32(step * work.shape.threads)
        there = place < fx.Int32(product.each * of_unit)
        place = there.select(place, fx.Int32(0))
        within, rest = place // fx.Int32(of_unit), place % fx.Int32(of_unit)
        row, column = rest // fx.Int32(columns), rest % fx.Int32(columns)
        unit, inside = product.unit(current, within)
        body(within, unit, row, column, inside & there & (row < work.rows))


def partials(work: Work, inputs: Any, weights: Any, ahead: Any, slots: Any) -> list[Any]:
    """``inputs`` (rows, inner) times ``weights`` (hidden, inner): this thread's fragment, rounded, for every turn.

    ``ahead``: what :func:`partials_ahead` gave; ``slots``: shared memory for ``work.reduced``, if there is one.
    """
    nothing = [fx.Vector.filled(COLUMNS, 0.0, fx.BFloat16) for _ in work.owned]
    if work.shape.matrix:
        source = reduced_source(work, inputs, weights)
        return each_round(work.reduced, source, slots, ahead, partial(_keep_fragments, work, slots), nothing)
    tokens = work.tokens(work.partial, inputs)

    def one(turn: Any, loaded: Any, kept: Any) -> list[Any]:
        sums = products(work.partial, work.partial_rows(weights, turn), tokens, work.shape.ahead, loaded)
        columns = [of_lane(work.partial, [row[i] for row in sums]) for i in range(COLUMNS)]
        return _put(kept, turn, fx.Vector.from_elements(columns, fx.Float32).to(fx.BFloat16))

    return over_turns(len(work.owned), partial(_dot_ahead, work, weights), one, ahead, nothing)


def partials_ahead(work: Work, weights: Any) -> Any:
    """The first weights that :func:`partials` multiplies, before the wait for its inputs."""
    if work.shape.matrix:
        return first_weights(work.reduced, reduced_source(work, weights, weights))
    return _dot_ahead(work, weights, fx.Int32(0))


def _dot_ahead(work: Work, weights: Any, turn: Any) -> Any:
    return load_ahead(work.partial, work.partial_rows(weights, turn), work.shape.ahead)


def _put(kept: Sequence[Any], turn: Any, value: Any, here: Any = None) -> list[Any]:
    """``kept`` with ``value`` at ``turn`` (i32), where ``here`` (bool) holds."""
    chosen = [turn == fx.Int32(i) for i in range(len(kept))]
    if here is not None:
        chosen = [one & here for one in chosen]
    return [one.select(value, before) for one, before in zip(chosen, kept, strict=True)]


def reduced_source(work: Work, inputs: Any, weights: Any) -> Source:
    last = fx.Int32(work.shape.hidden - 1)

    def weight(unit: Any, i: Any) -> Any:
        row = unit * fx.Int32(UNIT) + i
        return work.partial.row(weights, (row < last).select(row, last))

    return Source(weight, lambda row: work.token(work.partial, inputs, row))


def _keep_fragments(work: Work, slots: Any, current: Any, kept: Any) -> list[Any]:
    """A round's fragments: a column by each of eight threads, of which one in turn keeps them all: ``work.owned``."""
    steps, eighth = fragment_steps(work), fx.Int32(fx.thread_idx.x) % fx.Int32(COLUMNS)
    for step in range(steps):
        within, row, half, _ = fragment_of(work, fx.Int32(step))
        mine = work.reduced.result(slots, within, row, half * fx.Int32(COLUMNS) + eighth)
        first = work.lane - eighth
        columns = [fx.Float32(group_value(mine, first + fx.Int32(i))) for i in range(COLUMNS)]
        value = fx.Vector.from_elements(columns, fx.Float32).to(fx.BFloat16)
        place = current * fx.Int32(steps) + fx.Int32(step)
        kept = _put(kept, place // fx.Int32(COLUMNS), value, place % fx.Int32(COLUMNS) == eighth)
    return list(kept)
