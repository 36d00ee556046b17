# SPDX-License-Identifier: Apache-2.0
"""The tile product of :mod:`flycomm.primitives.warpgroup` by ``wgmma`` (sm_90 alone)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm
from flydsl.compiler import get_backend

from flycomm.primitives import warpgroup

_CHIP = "sm_90"
_STEP_BYTES = 32  # of a row that one instruction takes
_STEPS = warpgroup.ROW_BYTES // _STEP_BYTES
# of a matrix in shared memory, beside its address: 128-byte swizzle, eight rows after eight rows; by 16 bytes
FORM = 1 << 62 | (warpgroup.ALIGNMENT >> 4) << 32 | 1 << 16


def publish_operand() -> None:
    """Matrix units read shared memory by the asynchronous proxy."""
    llvm.inline_asm(None, [], "fence.proxy.async.shared::cta;", "~{memory}", has_side_effects=True)


def multiply_group(b: Any, first: Any, columns: int, a: Sequence[Sequence[Any]]) -> list[Any]:
    """Four instructions and the wait for them, as one statement: nothing sees registers that are not there yet."""
    if get_backend().target.arch.removesuffix("a") != _CHIP:
        return list(warpgroup.multiply_group.portable(b, first, columns, a))  # type: ignore[attr-defined]
    address = fx.Uint32(fx.Int64(fx.ptrtoint(b))) + fx.Uint32(first) * fx.Uint32(warpgroup.ROW_BYTES)
    matrix = address // fx.Uint32(16) + fx.Uint32(FORM & 0xFFFFFFFF)
    words = [a[half][segment][word] for step in range(_STEPS) for half, segment, word in words_of(step)]
    count, real = columns // 2, fx.Float32.ir_type
    made = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join([str(real)] * count)})>"),
        [fx.Uint32(word).ir_value() for word in words] + [matrix.ir_value()],
        statement(columns),
        ",".join(["=&f"] * count + ["r"] * len(words) + ["r", "~{memory}"]),
        has_side_effects=True,
    )
    return [fx.Float32(llvm.extractvalue(real, made, [i])) for i in range(count)]


def words_of(step: int) -> list[tuple[int, int, int]]:
    """What the registers of A have in a step: half, segment and word."""
    segment, second = divmod(step, 2)
    return [(half, segment, 2 * second + i) for i in range(2) for half in range(warpgroup.HALVES)]


def statement(columns: int) -> str:
    """Assembly: D, four registers of A for each step, the lower half of B's description.

    The first step does not add to what D's registers had before.
    """
    count = columns // 2
    total = ", ".join(f"${i}" for i in range(count))
    lines = [
        "{.reg .pred more; .reg .b32 low; .reg .b64 part; setp.ne.b32 more, 0, 0;",
        "bar.warp.sync 0xffffffff;",  # ptxas would move loads that come before behind the products, to save registers
        "wgmma.fence.sync.aligned;",
    ]
    for step in range(_STEPS):
        words = ", ".join(f"${count + 4 * step + i}" for i in range(4))
        if step == 1:
            lines.append("setp.eq.b32 more, 0, 0;")
        lines.append(
            f"add.u32 low, ${count + 4 * _STEPS}, {step * _STEP_BYTES >> 4}; mov.b64 part, {{low, {FORM >> 32}}}; "
            f"wgmma.mma_async.sync.aligned.m{warpgroup.ROWS}n{columns}k32.f32.e4m3.e4m3 "
            f"{{{total}}}, {{{words}}}, part, more, 1, 1;"
        )
    return " ".join([*lines, "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;}"])
