# SPDX-License-Identifier: Apache-2.0
"""The stages of :mod:`flycomm.kernels.mono_ffn`: what a block does between its waits."""

from collections.abc import Callable, Sequence
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.channel import FRAGMENT_BYTES
from flycomm.kernels._mono_work import COLUMNS, Work
from flycomm.primitives.access import load_element, load_fragment, store_element, store_fragment
from flycomm.primitives.activation import silu
from flycomm.primitives.call import Call
from flycomm.primitives.dot import GROUP, of_lane, products
from flycomm.primitives.norm import add, fold_lanes


@flyc.jit
def _when(condition: Any, body: Callable[[], None]) -> None:
    if condition:
        body()


def gate_up(work: Work, x: Any, weights: Any) -> None:
    """SiLU(gate) * up into ``work.act``: a tile is one column of both."""
    inter = work.shape.inter
    tokens = work.tokens(work.wide, x)
    for tile, inside in work.gate_up_tiles:
        pair = [work.wide.row(weights, tile), work.wide.row(weights, tile + fx.Int32(inter))]
        both = products(work.wide, pair, tokens, work.shape.ahead)
        gate, up = (of_lane(work.wide, [row[i] for row in both]) for i in range(2))
        value = silu(gate) * up
        place = fx.Int64(work.row) * fx.Int64(inter) + fx.Int64(tile)
        _store(inside & work.present, work.act + place * fx.Int64(2), value.to(fx.BFloat16))


def _store(condition: Any, address: Any, value: Any) -> None:
    _when(condition, lambda: store_element(address, value))


def down(work: Work, weights: Any, ahead: Sequence[Any]) -> list[Any]:
    """This lane's fragment of this rank's partial sums, rounded, for every turn."""
    tokens = work.tokens(work.down, work.act)
    partials = []
    for turn in range(len(work.down_tiles)):
        sums = products(work.down, work.down_rows(weights, turn), tokens, work.shape.ahead, None if turn else ahead)
        columns = [of_lane(work.down, [row[i] for row in sums]) for i in range(COLUMNS)]
        partials.append(fx.Vector.from_elements(columns, fx.Float32).to(fx.BFloat16))
    return partials


def _post_one(work: Work, call: Call, verbs: Any, turn: int, fragment: Any) -> None:
    slot = work.fragment_of(turn)
    _when(work.mine(turn), lambda: verbs.post(call, fragment, slot))


def post(work: Work, call: Call, verbs: Any, partials: Sequence[Any]) -> None:
    """To every peer; a slot is keyed by row and tile, so the thread that posts one is the one that takes it."""
    for turn, fragment in enumerate(partials):
        _post_one(work, call, verbs, turn, fragment)


def _fragment_at(matrix: Any, index: Any) -> Any:
    return matrix + fx.Int64(index) * fx.Int64(FRAGMENT_BYTES)


def load_residual(work: Work, residual: Any, norm_weight: Any) -> list[Any]:
    """For every turn, this lane's fragments of the residual and of the norm's weight."""
    loaded = []
    for turn, (tile, _) in enumerate(work.down_tiles):
        addresses = _fragment_at(residual, work.fragment_of(turn)), _fragment_at(norm_weight, tile)
        loaded.append([load_fragment(address, fx.BFloat16) for address in addresses])
    return loaded


def _reduce_one(
    work: Work, call: Call, verbs: Any, turn: int, partial: Any, residual: Any, weight: Any, residual_out: Any
) -> None:
    index = work.fragment_of(turn)
    squares_at = work.squares + fx.Int64(index) * fx.Int64(4)

    def body() -> None:
        total = verbs.take(call, partial, index).to(fx.BFloat16).to(fx.Float32) + residual.to(fx.Float32)
        square = fx.Float32(0.0)
        for e in range(COLUMNS):
            square = fx.fma(total[e], total[e], square)
        store_fragment(_fragment_at(residual_out, index), total.to(fx.BFloat16))
        store_fragment(_fragment_at(work.weighted, index), (total * weight.to(fx.Float32)).to(fx.BFloat16))
        store_element(squares_at, square)

    _when(work.mine(turn), body)


def reduce(
    work: Work, call: Call, verbs: Any, partials: Sequence[Any], before: Sequence[Any], residual_out: Any
) -> None:
    """The sum over ranks, plus the residual; the row for the norm, and each fragment's sum of squares."""
    for turn, (partial, (residual, weight)) in enumerate(zip(partials, before, strict=True)):
        _reduce_one(work, call, verbs, turn, partial, residual, weight, residual_out)


def norm_factors(work: Work, scales: Any, eps: Any) -> None:
    """``1 / sqrt(mean + eps)`` of every row into shared memory, each by one group, in one order of adding."""
    shape = work.shape
    for turn in range(-(-shape.rows // shape.groups)):
        row = work.group + fx.Int32(turn * shape.groups)
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
    fx.gpu.barrier()


@flyc.jit
def _store_scale(scales: Any, row: Any, scale: Any, here: Any) -> None:
    if here:
        scales[row] = scale


def project(work: Work, call: Call, weights: Any, ahead: Sequence[Any], scales: Any, out: Any) -> None:
    """The next projection of the weighted rows, times each row's factor; NaN if the call failed. A tile: 2 columns."""
    tokens = work.tokens(work.projection, work.weighted)
    scale = call.ok.select(scales[work.row], fx.Float32(float("nan")))
    for turn, (tile, inside) in enumerate(work.projection_tiles):
        pair = work.projection_rows(weights, turn)
        both = products(work.projection, pair, tokens, work.shape.ahead, None if turn else ahead)
        for i in range(2):
            value = (of_lane(work.projection, [row[i] for row in both]) * scale).to(fx.BFloat16)
            place = fx.Int64(work.row) * fx.Int64(work.shape.out) + fx.Int64(tile * fx.Int32(2) + fx.Int32(i))
            _store(inside & work.present, out + place * fx.Int64(2), value)
