# SPDX-License-Identifier: Apache-2.0
"""Activation functions of a value in a register: f32 in, f32 out. Each orders nothing.

The exponential is the hardware's, by LLVM's own intrinsic (FlyDSL's ``fx.exp2`` needs ROCm's device library): a few
ulp, the same bits on all GPUs of a kind, others on another target.
"""

from typing import Any

import flydsl.expr as fx
from flydsl._mlir.dialects import llvm

_LOG2_E = 1.4426950408889634


def _power(x: Any, base_log2: float) -> Any:
    """``2 ** (x * base_log2)``."""
    power = fx.Float32(x * fx.Float32(base_log2))
    return fx.Float32(llvm.call_intrinsic(fx.Float32.ir_type, "llvm.exp2.f32", [power.ir_value()], [], []))


def exp(x: Any) -> Any:
    """``e ** x``: NaN of NaN, 0 of -inf."""
    return _power(x, _LOG2_E)


def sigmoid(x: Any) -> Any:
    """``1 / (1 + exp(-x))``: NaN of NaN, 0 far below zero, 1 from about 17 on."""
    return fx.Float32(1.0) / (fx.Float32(1.0) + _power(x, -_LOG2_E))


def silu(x: Any) -> Any:
    """``x / (1 + exp(-x))``: NaN of NaN, -0 far below zero."""
    return x / (fx.Float32(1.0) + _power(x, -_LOG2_E))
