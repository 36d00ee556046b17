# SPDX-License-Identifier: Apache-2.0
"""Activation functions of a value in a register."""

from typing import Any

import flydsl.expr as fx
from flydsl._mlir.dialects import llvm

_LOG2_E = 1.4426950408889634


def silu(x: Any) -> Any:
    """``x / (1 + exp(-x))`` of an f32, in f32: NaN of NaN, -0 far below zero. Orders nothing.

    The exponential is the hardware's, by LLVM's own intrinsic (FlyDSL's ``fx.exp2`` needs ROCm's device library): a few
    ulp, the same bits on all GPUs of a kind, others on another target.
    """
    power = fx.Float32(x * fx.Float32(-_LOG2_E))
    exponential = llvm.call_intrinsic(fx.Float32.ir_type, "llvm.exp2.f32", [power.ir_value()], [], [])
    return x / (fx.Float32(1.0) + fx.Float32(exponential))
