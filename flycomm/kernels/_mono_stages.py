# SPDX-License-Identifier: Apache-2.0
"""What mono layers share after a projection (``_mono_products.py``): its all-reduce, residual, RMSNorm's factors."""

from collections.abc import Callable, Sequence
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.channel import FRAGMENT_BYTES
from flycomm.kernels._mono_products import in_turns
from flycomm.kernels._mono_work import COLUMNS, Owned, Work
from flycomm.kernels._protocols import VERBS
from flycomm.primitives import fragment, packet
from flycomm.primitives.access import load_element, load_fragment, store_element, store_fragment
from flycomm.primitives.call import Call
from flycomm.primitives.dot import GROUP
from flycomm.primitives.norm import add, fold_lanes


@flyc.jit
def when(condition: Any, body: Callable[[], None]) -> None:
    """``body()`` in the threads for which it holds."""
    if condition:
        body()


def store_if(condition: Any, address: Any, value: Any) -> None:
    when(condition, lambda: store_element(address, value))


def fragment_at(matrix: Any, index: Any) -> Any:
    """Address of fragment ``index`` (i32) of the matrix at ``matrix``."""
    return matrix + fx.Int64(index) * fx.Int64(FRAGMENT_BYTES)


def _post_one(call: Call, verbs: Any, own: Owned, partial: Any) -> None:
    when(own.mine, lambda: verbs.post(call, partial, own.index))


def _load_before(work: Work, residual: Any, norm_weight: Any) -> list[Any]:
    """For every turn, this thread's fragments of the residual and of the norm's weight."""
    loaded = []
    for own in work.owned:
        addresses = fragment_at(residual, own.index), fragment_at(norm_weight, own.tile)
        loaded.append([load_fragment(address, fx.BFloat16) for address in addresses])
    return loaded


def _store_weighted(work: Work, index: Any, weighted: Any) -> None:
    """Eight elements, in as many fragments as they take."""
    dtype = work.shape.weighted_type
    each = 8 * FRAGMENT_BYTES // dtype.width
    rounded, parts = weighted.to(dtype), COLUMNS // each
    for part in range(parts):
        values = rounded
        if parts > 1:
            values = fx.Vector.from_elements([rounded[part * each + e] for e in range(each)], dtype)
        store_fragment(fragment_at(work.weighted, index * fx.Int32(parts) + fx.Int32(part)), values)


@flyc.jit
def _made_if(condition: Any, make: Callable[[], Any], otherwise: Any) -> Any:
    value = otherwise
    if condition:
        value = make()
    return value


def _reduce_one(
    work: Work, call: Call, verbs: Any, own: Owned, partial: Any, residual: Any, weight: Any, residual_out: Any
) -> Any:
    index = own.index
    squares_at = work.squares + fx.Int64(index) * fx.Int64(4)

    def reduced() -> Any:
        total = verbs.take(call, partial, index).to(fx.BFloat16).to(fx.Float32) + residual.to(fx.Float32)
        square = fx.Float32(0.0)
        for e in range(COLUMNS):
            square = fx.fma(total[e], total[e], square)
        weighted = total * weight.to(fx.Float32)
        store_fragment(fragment_at(residual_out, index), total.to(fx.BFloat16))
        _store_weighted(work, index, weighted)
        store_element(squares_at, square)
        return weighted

    return _made_if(own.mine, reduced, fx.Vector.filled(COLUMNS, 0.0, fx.Float32))


def all_reduce(
    work: Work,
    call: Call,
    protocol: str,
    made: Sequence[Any],
    hidden_by: Callable[[], Any],
    residual: Any,
    norm_weight: Any,
    residual_out: Any,
) -> tuple[list[Any], Any]:
    """The sum over ranks of what ``_mono_products.partials`` made, plus the residual; and what is needed to norm it.

    Stores ``residual_out``, the rows times the norm's weight in ``work.weighted``, and each fragment's sum of squares.
    ``hidden_by()`` loads what hides the link. Returns this thread's fragments of the weighted rows for every turn, f32,
    and what ``hidden_by`` gave. A slot is keyed by row and tile: the thread that posts one is the one that takes it.
    """
    verbs = VERBS[protocol]
    for own, partial in zip(work.owned, made, strict=True):
        _post_one(call, verbs, own, partial)
    if protocol == "packets":
        packet.meet(call)
    else:
        fragment.arrive(call)
    loaded = hidden_by()
    before = _load_before(work, residual, norm_weight)
    if protocol == "flags":
        fragment.wait(call)
    weighted = [
        _reduce_one(work, call, verbs, own, partial, own_residual, weight, residual_out)
        for own, partial, (own_residual, weight) in zip(work.owned, made, before, strict=True)
    ]
    return weighted, loaded


def norm_factors(work: Work, scales: Any, eps: Any) -> None:
    """``1 / sqrt(mean + eps)`` of every row into shared memory, each by one group, in one order of adding."""
    shape = work.shape

    def one(turn: Any, _: Any, kept: Any) -> Any:
        row = work.group + turn * fx.Int32(shape.groups)
        inside = row < work.rows
        base = work.squares + fx.Int64(inside.select(row, fx.Int32(0))) * fx.Int64(shape.fragments * 4)
        total = fx.Float32(0.0)
        for step in range(-(-shape.fragments // GROUP)):
            place = work.lane + fx.Int32(step * GROUP)
            there = place < fx.Int32(shape.fragments)
            address = base + fx.Int64(there.select(place, fx.Int32(0))) * fx.Int64(4)
            total = total + there.select(load_element(address, fx.Float32), fx.Float32(0.0))
        mean = fold_lanes(total, GROUP, add) / fx.Float32(float(shape.hidden))
        scale = fx.Float32(1.0) / fx.sqrt(mean + eps)
        _store_scale(scales, row, scale, inside & (work.lane == fx.Int32(0)))
        return kept

    in_turns(-(-shape.rows // shape.groups), one)
    fx.gpu.barrier()


@flyc.jit
def _store_scale(scales: Any, row: Any, scale: Any, here: Any) -> None:
    if here:
        scales[row] = scale


def factor(call: Call, scales: Any, row: Any) -> Any:
    """The norm's factor of token row ``row`` (i32); NaN if the call failed."""
    return call.ok.select(scales[row], fx.Float32(float("nan")))
