# SPDX-License-Identifier: Apache-2.0
"""A tile product by a group of lanes: ``D[16 rows × columns] += A[16 × k] · B[columns × k]ᵀ``, sums in f32.

The form of matrix instructions: all three are spread over the lanes of a group, and a :class:`Layout` says how. Rows of
A are what stays (queries × heads), rows of B what streams by (keys). Both lie in memory row by row, and ``k`` is
cut into segments of 64 bytes: a lane holds one *quarter* of each, 16 bytes that one load brings, of the B row of its
column and of one or two rows of A. A sum does not care which k comes when, as long as A and B agree: so no operand is
moved between lanes, nor transposed.

The portable product computes in either layout, with fma from shuffled operands. Elements are bf16, or e4m3 of either
format. An element of D depends neither on the row and column where it is computed, nor on the others; its bits differ
between targets, which add in orders of their own.
"""

from collections.abc import Sequence
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives._override import overridable
from flycomm.primitives.decode import bf16_values, fp8_values
from flycomm.primitives.matrix_layout import QUARTERS, RESULTS, ROWS, SEGMENT, WARP, WAVE, Layout, layout
from flycomm.primitives.quant import Fp8

__all__ = [
    "BF16",
    "QUARTERS",
    "RESULTS",
    "ROWS",
    "SEGMENT",
    "WARP",
    "WAVE",
    "Element",
    "Layout",
    "layout",
    "multiply",
    "prepare",
    "zeros",
]

BF16 = "bf16"
Element = str | Fp8  # BF16, or a format of primitives/quant


def zeros() -> list[Any]:
    """A D of zeros."""
    return [fx.Float32(0.0) for _ in range(RESULTS)]


@overridable
def prepare(element: Element, fragment: Any) -> Any:
    """A quarter (u32 × 4) of either operand as :func:`multiply` takes it: made once for all products that it is in."""
    return fragment


@overridable
def multiply(form: Layout, element: Element, total: list[Any], a: Sequence[Sequence[Any]], b: Sequence[Any]) -> Any:
    """``total + A · Bᵀ``: this lane's D, a list of 4 f32.

    ``a[segment][part]`` and ``b[segment]``: this lane's quarters of ``element``, by :func:`prepare`. Every lane of the
    warp calls it, with the same ``element`` and number of segments. Products are exact; how sums are rounded is the
    target's. A NaN or infinity comes out as in f32, in the rows and columns that it belongs to. Orders nothing.
    """
    for parts, fragment in zip(a, b, strict=True):
        total = _segment(form, element, total, list(parts), fragment)
    return total


@flyc.jit
def _segment(form: Layout, element: Element, total: Any, parts: Any, fragment: Any) -> Any:
    """Quarter by quarter: fetch it of the lane's rows and columns, and multiply."""
    lane = form.lane()
    quarter = fx.Int32(0)
    while quarter < fx.Int32(QUARTERS):
        total = _quarter(form, element, total, parts, fragment, lane, quarter)
        quarter = quarter + fx.Int32(1)
    return total


def _quarter(form: Layout, element: Element, total: Any, parts: Any, fragment: Any, lane: Any, quarter: Any) -> Any:
    rows = []
    for group, row in enumerate(form.rows_of(lane)):
        part = parts[group] if form.parts > 1 else parts[0]
        rows.append(_values(element, _fetch(form, part, form.holder(row % fx.Int32(form.columns), quarter))))
    columns = [_values(element, _fetch(form, fragment, form.holder(c, quarter))) for c in form.columns_of(lane)]
    total = list(total)
    for row, row_results in enumerate(form.by_row):
        for column, column_results in enumerate(form.by_column):
            (i,) = set(row_results) & set(column_results)
            for left, right in zip(rows[row], columns[column], strict=True):
                total[i] = fx.fma(left, right, total[i])
    return total


def _fetch(form: Layout, fragment: Any, lane: Any) -> Any:
    words = [fx.Uint32(fx.gpu.shuffle_idx(fragment[i], lane, form.lanes)) for i in range(4)]
    return fx.Vector.from_elements(words, fx.Uint32)


def _values(element: Element, fragment: Any) -> list[Any]:
    return fp8_values(fragment, element) if isinstance(element, Fp8) else bf16_values(fragment)
