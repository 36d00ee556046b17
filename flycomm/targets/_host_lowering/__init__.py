# SPDX-License-Identifier: Apache-2.0
"""From traced FlyDSL to functions for CPU cores.

1. FlyDSL's own first passes, up to ``gpu``, ``scf``, ``arith``, ``vector`` and ``llvm`` operations.
2. :func:`lower` rewrites those: ``_kernels`` takes bodies out of the ``gpu.module`` and turns what a GPU thread asks
   of its hardware into calls of ``csrc_shim/host_runtime.h``; ``_memory`` puts yield points before polling reads,
   and in the weak mode hands stores to the runtime; ``_launches`` turns launches into calls.
3. :data:`LAST_PASSES` convert the rest to LLVM.
"""

from __future__ import annotations

from flydsl._mlir import ir
from flydsl._mlir.passmanager import PassManager
from flydsl.compiler.diagnostics import DSLCompileError, diag_records_from_mlir_error

from flycomm.targets._flydsl import FIRST_PASSES
from flycomm.targets._host_lowering._build import Builder, unsupported
from flycomm.targets._host_lowering._functions import operations
from flycomm.targets._host_lowering._kernels import lower_kernels
from flycomm.targets._host_lowering._launches import lower_launches
from flycomm.targets._host_lowering._memory import flatten_address_spaces, lower_memory, refuse_access

LAST_PASSES = (
    # bf16 is computed in f32 and rounded by integer operations: the same bits on every CPU, denormals included
    "arith-emulate-unsupported-floats{source-types=bf16 target-type=f32}",
    "math-extend-to-supported-types{target-type=f32}",
    "arith-expand{include-bf16=true}",
    "convert-scf-to-cf",
    "cse",
    "convert-vector-to-llvm",
    "convert-math-to-llvm",
    "convert-math-to-libm",
    "convert-arith-to-llvm",
    "convert-index-to-llvm",
    "convert-ub-to-llvm",
    "convert-cf-to-llvm",
    "convert-func-to-llvm",
    "reconcile-unrealized-casts",
)

_DIALECTS = frozenset(("arith", "builtin", "cf", "func", "gpu", "index", "llvm", "math", "scf", "ub", "vector"))
_NO_MEANING = frozenset(("llvm.inline_asm", "llvm.blockaddress", "llvm.invoke"))


def _run_first_passes(module: ir.Module) -> None:
    passes = PassManager.parse(f"builtin.module({','.join(FIRST_PASSES)})")
    try:
        passes.run(module.operation)
    except ir.MLIRError as error:  # as FlyDSL reports its own passes, with the lines of the user's source
        raise DSLCompileError(str(error), diagnostics=diag_records_from_mlir_error(error)) from error


def _refuse(module: ir.Module, *, weak: bool) -> None:
    for op in operations(module.operation):
        if op.name.split(".", 1)[0] not in _DIALECTS or op.name in _NO_MEANING:
            unsupported(op)
        refuse_access(op, weak=weak)


def lower(module: ir.Module, *, warp_size: int, weak: bool) -> None:
    """Rewrite a traced module in place, as far as :data:`LAST_PASSES` can take it on.

    ``weak`` hands stores to the runtime, which lets those into peers' memory land late. Raises
    :class:`flycomm.errors.UnsupportedOnTarget` for an operation that CPU cores cannot do.
    """
    _run_first_passes(module)
    _refuse(module, weak=weak)
    builder = Builder(module)
    functions = lower_kernels(module, builder)
    for function in functions:
        lower_memory(function, builder, weak=weak)
    lower_launches(module, builder, functions, warp_size=warp_size)
    flatten_address_spaces(module)
    module.operation.verify()


__all__ = ["LAST_PASSES", "lower"]
