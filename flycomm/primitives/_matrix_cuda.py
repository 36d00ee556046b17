# SPDX-License-Identifier: Apache-2.0
"""The tile product of :mod:`flycomm.primitives.matrix` by ``mma.sync``.

e4m3 is widened to f16, which is exact. sm_90 has no other way: its assembler makes the same of ``mma.sync`` with e4m3,
but widens both operands again for every product. Here it is done once for as many as an operand is used in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm
from flydsl.compiler import get_backend

from flycomm.primitives import matrix
from flycomm.primitives.quant import E4M3FN

_FP8_SINCE = 89  # sm_89 converts it
_WIDEN = "{.reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h;}"


def _widens(element: matrix.Element) -> bool:
    return element == E4M3FN and int(get_backend().target.arch.removeprefix("sm_").rstrip("af")) >= _FP8_SINCE


def prepare(element: matrix.Element, fragment: Any) -> Any:
    """Words of two elements each; of e4m3, as f16."""
    if not _widens(element):
        return fragment
    return [half for i in range(4) for half in _widen(fragment[i])]


def _widen(word: Any) -> tuple[Any, Any]:
    whole = fx.Uint32.ir_type
    pair = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({whole}, {whole})>"), [fx.Uint32(word).ir_value()], _WIDEN, "=r,=r,r"
    )
    return fx.Uint32(llvm.extractvalue(whole, pair, [0])), fx.Uint32(llvm.extractvalue(whole, pair, [1]))


def multiply(
    form: matrix.Layout, element: matrix.Element, total: list[Any], a: Sequence[Sequence[Any]], b: Sequence[Any]
) -> Any:
    """An instruction for every 32 bytes of 16 bits.

    They count as having side effects: nothing may move them under a condition that splits the warp.
    """
    widened = _widens(element)
    if form != matrix.WARP or (element != matrix.BF16 and not widened):
        return matrix.multiply.portable(form, element, total, a, b)  # type: ignore[attr-defined]
    for (low, high), fragment in zip(a, b, strict=True):
        for i in range(0, 8 if widened else 4, 2):
            words = [low[i], high[i], low[i + 1], high[i + 1], fragment[i], fragment[i + 1]]
            total = _instruction("f16" if widened else "bf16", words, total)
    return total


def _instruction(dtype: str, words: Sequence[Any], total: Sequence[Any]) -> list[Any]:
    real = fx.Float32.ir_type
    result = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({real}, {real}, {real}, {real})>"),
        [fx.Uint32(word).ir_value() for word in words] + [fx.Float32(one).ir_value() for one in total],
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        has_side_effects=True,
    )
    return [fx.Float32(llvm.extractvalue(real, result, [i])) for i in range(matrix.RESULTS)]
