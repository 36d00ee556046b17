# SPDX-License-Identifier: Apache-2.0
"""Mathematical functions on NVIDIA GPUs.

The compiler would send nearly all of ``fx.math`` to NVIDIA's libdevice, whose square root is then an approximation.
What the hardware has is lowered here instead, correctly rounded and with the same bits as on the host target: ``sqrt``,
``rsqrt`` (as ``1 / sqrt``), ``fma``, ``absf``, ``copysign``, ``ceil``, ``floor``, ``trunc``, ``round``, ``roundeven``,
``clampf`` and the predicates. ``exp2`` is the hardware's (2 ulp; f32 and narrower). The rest needs libdevice, which
comes with the CUDA toolkit and with triton, and is a clear error without it.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from flydsl._mlir import ir
from flydsl._mlir.dialects import arith, llvm
from flydsl._mlir.passmanager import PassManager

from flycomm.targets._cuda_operations import operations, unsupported

# An empty "toolkit" of this package: its libdevice has no functions. See _cuda_lowering.last_passes.
TOOLKIT = Path(__file__).with_name("_cuda_toolkit")

_EXPANDED = ("clampf", "rsqrt")
_INTRINSICS = {
    "math.absf": "llvm.fabs",
    "math.ceil": "llvm.ceil",
    "math.copysign": "llvm.copysign",
    "math.exp2": "llvm.exp2",
    "math.floor": "llvm.floor",
    "math.fma": "llvm.fma",
    "math.round": "llvm.round",
    "math.roundeven": "llvm.roundeven",
    "math.sqrt": "llvm.sqrt",
    "math.trunc": "llvm.trunc",
}
_LEFT_TO_MLIR = frozenset(f"math.{name}" for name in ("absi", "ctlz", "ctpop", "cttz", "ipowi", "isfinite", "isnan"))
# fmt: off
_IN_LIBDEVICE = frozenset(
    f"math.{name}"
    for name in (
        "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "erf", "erfc", "exp", "exp2",
        "expm1", "fpowi", "log", "log10", "log1p", "log2", "powf", "sin", "sincos", "sinh", "tan", "tanh",
    )
)
# fmt: on


def find_libdevice() -> str:
    """Path of NVIDIA's device library, from the CUDA toolkit or from triton; empty if there is none.

    A path that MLIR's pass options cannot carry does not count.
    """
    roots = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    places = [Path(root, "nvvm", "libdevice") for root in roots if root]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.submodule_search_locations:
        places += [Path(place, "backends", "nvidia", "lib") for place in triton.submodule_search_locations]
    files = [str(place / "libdevice.10.bc") for place in places]
    return next((file for file in files if not set(file) & set(" ,{}\"'") and Path(file).is_file()), "")


def lower(kernels: ir.Operation, *, libdevice: bool) -> None:
    """Rewrite the ``math`` operations of a ``gpu.module``; refuse those that nothing implements."""
    PassManager.parse(f"gpu.module(math-expand-ops{{ops={','.join(_EXPANDED)}}})").run(kernels)
    for op in operations(kernels):
        if not op.name.startswith("math."):
            continue
        if op.name in _INTRINSICS and not (op.name == "math.exp2" and _element(op) == ir.F64Type.get()):
            _replace(op, _intrinsic(op, _INTRINSICS[op.name]))
        elif op.name == "math.isinf":
            _replace(op, _is_infinite(op))
        elif op.name not in _LEFT_TO_MLIR and (why := _missing(op, libdevice)):
            unsupported(op, why)


def _missing(op: ir.Operation, libdevice: bool) -> str:
    """Why libdevice cannot implement an operation; empty if it can. What it cannot would abort the process later."""
    if op.name not in _IN_LIBDEVICE:
        return "nothing implements it"
    if op.name == "math.sincos" and op.operands[0].type not in (ir.F32Type.get(), ir.F64Type.get()):
        return "it takes one f32 or f64"
    return "" if libdevice else "it needs NVIDIA's libdevice: install the CUDA toolkit or triton, or set CUDA_HOME"


def _element(op: ir.Operation) -> ir.Type:
    ty = op.operands[0].type
    return ir.VectorType(ty).element_type if isinstance(ty, ir.VectorType) else ty


def _intrinsic(op: ir.Operation, name: str) -> ir.Value:
    flags = None
    if "fastmath" in op.attributes:
        flags = ir.Attribute.parse(str(op.attributes["fastmath"]).replace("#arith.", "#llvm."))
    with ir.InsertionPoint(op), op.location:
        return llvm.call_intrinsic(op.results[0].type, name, list(op.operands), [], [], fastmath_flags=flags)


def _is_infinite(op: ir.Operation) -> ir.Value:
    value = op.operands[0]
    with ir.InsertionPoint(op), op.location:
        size = llvm.call_intrinsic(value.type, "llvm.fabs", [value], [], [])
        infinity: ir.Attribute = ir.FloatAttr.get(_element(op), float("inf"))
        if isinstance(value.type, ir.VectorType):
            infinity = ir.DenseElementsAttr.get_splat(value.type, infinity)
        return arith.cmpf(arith.CmpFPredicate.OEQ, size, arith.constant(value.type, infinity))


def _replace(op: ir.Operation, value: ir.Value) -> None:
    op.results[0].replace_all_uses_with(value)
    op.erase()
