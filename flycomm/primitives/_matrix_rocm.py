# SPDX-License-Identifier: Apache-2.0
"""The tile product of :mod:`flycomm.primitives.matrix` by MFMA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flydsl.expr as fx
from flydsl.compiler import get_backend

from flycomm.primitives import matrix
from flycomm.primitives.quant import native

_CHIPS = ("gfx942", "gfx950")


def multiply(
    form: matrix.Layout, element: matrix.Element, total: list[Any], a: Sequence[Sequence[Any]], b: Sequence[Any]
) -> Any:
    """Two instructions a segment. An e4m3 that is not the chip's own goes the portable way."""
    arch = get_backend().target.arch
    if form != matrix.WAVE or arch not in _CHIPS or (element != matrix.BF16 and element != native(arch)):
        return matrix.multiply.portable(form, element, total, a, b)  # type: ignore[attr-defined]
    sums = fx.Vector.from_elements(total, fx.Float32)
    for (left,), right in zip(a, b, strict=True):
        for half in range(2):
            sums = _instruction(element, _half(left, half), _half(right, half), sums)
    return [sums[i] for i in range(matrix.RESULTS)]


def _half(fragment: Any, half: int) -> Any:
    return fx.Vector.from_elements([fragment[2 * half], fragment[2 * half + 1]], fx.Uint32)


def _instruction(element: matrix.Element, left: Any, right: Any, sums: Any) -> Any:
    if element == matrix.BF16:
        operands = [one.bitcast(fx.Int16).ir_value() for one in (left, right)]
        made = fx.rocdl.mfma_f32_16x16x16bf16_1k(sums.ir_value().type, [*operands, sums.ir_value(), 0, 0, 0])
    else:
        operands = [one.bitcast(fx.Int64)[0].ir_value() for one in (left, right)]
        made = fx.rocdl.mfma_f32_16x16x32_fp8_fp8(sums.ir_value().type, [*operands, sums.ir_value(), 0, 0, 0])
    return fx.Vector(made)
