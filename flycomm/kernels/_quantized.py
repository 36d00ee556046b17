# SPDX-License-Identifier: Apache-2.0
"""A row in 8 bits, as a kernel's second output: its codes, and the scales that it was divided by."""

from collections.abc import Sequence
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives import quant
from flycomm.primitives.access import load_element, store_element
from flycomm.primitives.decode import widen
from flycomm.primitives.quant import Fp8
from flycomm.primitives.row import Rows, if_inside, zero_past_the_end

QUANTS = ("none", "static", "token", "group")


@flyc.jit
def _store_scale(address: Any, mine: Any, index: Any, scale: Any) -> None:
    if mine:
        store_element(address + fx.Int64(index) * fx.Int64(4), scale)


def _store_group_scales(rows: Rows, address: Any, row: Any, scales: Sequence[Any], group: int) -> None:
    """One for every ``group`` fragments of the row, by the thread that has the first of them."""
    groups = (rows.fragments + fx.Int32(group - 1)) // fx.Int32(group)
    for place, inside, scale in zip(rows.places, rows.inside, scales, strict=True):
        leads = inside & (place % fx.Int32(group) == fx.Int32(0))
        _store_scale(address, leads, row * groups + place // fx.Int32(group), scale)


def store_quantized(
    rows: Rows,
    row: Any,
    values: Sequence[Any],
    how: str,
    fmt: Fp8,
    floor: float,
    codes_at: Any,
    scales_at: Any,
    slots: Any,
    turn: Any,
) -> None:
    """Store ``values``, this thread's fragments of row ``row`` (i32), in ``fmt``, and the scales unless ``how`` is
    "static", which reads one. Every thread of the block calls it; "token" contains a block barrier and uses ``slots``
    at ``turn``, as :func:`flycomm.primitives.norm.fold_block`. ``floor`` is the least scale."""
    wide = zero_past_the_end(rows, [widen(value) for value in values])
    if how == "static":
        scales = [load_element(scales_at, fx.Float32)] * rows.each
    elif how == "token":
        scale = quant.scale_of(quant.amax_of_row(wide, slots, turn, rows.threads), fmt, floor)
        scales = [scale] * rows.each
        _store_scale(scales_at, fx.Int32(fx.thread_idx.x) == fx.Int32(0), row, scale)
    else:
        scales = [quant.scale_of(quant.amax_of_group(value), fmt, floor) for value in wide]
        _store_group_scales(rows, scales_at, row, scales, quant.GROUP // wide[0].numel)
    codes = [quant.quantize(value, scale, fmt) for value, scale in zip(wide, scales, strict=True)]
    offsets = rows.offsets(row)
    if_inside(rows, lambda k: quant.store(codes_at + offsets[k] * fx.Int64(codes[k].numel), codes[k]))
