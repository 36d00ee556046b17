# SPDX-License-Identifier: Apache-2.0
"""From traced FlyDSL to PTX, with the NVPTX code generator that FlyDSL's wheel carries.

:func:`lower` runs FlyDSL's own first passes and then rewrites what NVPTX would take the wrong way:

- Static shared memory comes out of those passes as external arrays, and in PTX all external shared arrays start at one
  address: two allocations would be one memory. They become internal. Dynamic shared memory (an array of 0 bytes) stays.
- AMD's names of synchronisation scopes become NVPTX's: ``agent`` is ``device`` (``.gpu``), ``workgroup`` and
  ``wavefront`` are ``block`` (``.cta``); no name is system scope (``.sys``).
- ``waves_per_eu``, a hint for AMD GPUs, becomes the number of blocks that a multiprocessor must hold: as many threads
  as on a compute unit. The kernel gets no more registers than leave room for them.
- Mathematics: see :mod:`flycomm.targets._cuda_math`.
- What only AMD GPUs have is refused by name, and so is a shuffle of a part of a warp: of a width below 32, MLIR makes
  one whose mask has the warp's first lanes alone, and the others, which execute it too, get anything.

:func:`last_passes` take the result to PTX text. Floating-point contraction is off: ``a * b + c`` is two instructions
with their own rounding, so sums have the same bits on every target.
"""

from __future__ import annotations

import math

from flydsl._mlir import ir
from flydsl._mlir.passmanager import PassManager
from flydsl.compiler.diagnostics import DSLCompileError, diag_records_from_mlir_error

from flycomm.targets import _cuda_math
from flycomm.targets._cuda_operations import operations, unsupported
from flycomm.targets._flydsl import FIRST_PASSES

_SCOPES = {
    "": "",
    "agent": "device",
    "workgroup": "block",
    "wavefront": "block",
    "singlethread": "singlethread",
    "one-as": "",
    "agent-one-as": "device",
    "workgroup-one-as": "block",
    "wavefront-one-as": "block",
    "singlethread-one-as": "singlethread",
    "device": "device",
    "cluster": "cluster",
    "block": "block",
}
_FOREIGN_DIALECTS = frozenset(("amdgpu", "fly", "fly_ktrace", "fly_rocdl", "rocdl"))
_WARP = 32  # lanes
_OWN = {"wgmma.": {"sm_90": "sm_90a"}}  # what only one chip has: PTX that says so runs on no other
_SHARED = 3  # LLVM's number of the address space


def lower(module: ir.Module, *, libdevice: bool, resident_threads: int = 0) -> None:
    """Rewrite a traced module in place, as far as :func:`last_passes` can take it on.

    ``libdevice`` says whether NVIDIA's device library is linked; ``resident_threads``, how many threads of a kernel a
    multiprocessor must be able to hold (0: no demand). Raises
    :class:`flycomm.errors.UnsupportedOnTarget` for an operation without a meaning on NVIDIA GPUs.
    """
    try:
        PassManager.parse(f"builtin.module({','.join(FIRST_PASSES)})").run(module.operation)
        for kernels in module.body.operations:
            if kernels.operation.name == "gpu.module":
                _lower_operations(kernels.operation)
                if resident_threads:
                    _hold_blocks(kernels.operation, resident_threads)
                _cuda_math.lower(kernels.operation, libdevice=libdevice)
        module.operation.verify()
    except ir.MLIRError as error:  # as FlyDSL does for its own pipeline: it then shows the user's line
        raise DSLCompileError(str(error), diagnostics=diag_records_from_mlir_error(error)) from error


def chip_of(module: ir.Module, arch: str) -> str:
    """The chip to say in PTX for ``arch``: its own, if the module's inline assembly has what no other chip has."""
    texts = [
        ir.StringAttr(op.attributes["asm_string"]).value
        for kernels in module.body.operations
        if kernels.operation.name == "gpu.module"
        for op in operations(kernels.operation)
        if op.name == "llvm.inline_asm"
    ]
    chips = [own[arch] for what, own in _OWN.items() if arch in own and any(what in text for text in texts)]
    return chips[0] if chips else arch


def _is_of_whole_warps(op: ir.Operation) -> None:
    width = op.operands[2].owner
    if isinstance(width, ir.Block) or "value" not in width.attributes:
        return
    lanes = ir.IntegerAttr(width.attributes["value"]).value
    if lanes < _WARP:
        unsupported(op, f"only the first {lanes} lanes of a warp would take part; shuffle with a width of {_WARP}")


def _lower_operations(kernels: ir.Operation) -> None:
    for op in operations(kernels):
        if op.name.partition(".")[0] in _FOREIGN_DIALECTS:
            unsupported(op, "it is for AMD GPUs")
        if op.name == "llvm.call_intrinsic" and ir.StringAttr(op.attributes["intrin"]).value.startswith("llvm.amdgcn"):
            unsupported(op, f"{ir.StringAttr(op.attributes['intrin']).value} is for AMD GPUs")
        if "syncscope" in op.attributes:
            _rename_scope(op)
        if op.name == "gpu.shuffle":
            _is_of_whole_warps(op)
        if op.name == "llvm.mlir.global":
            _keep_apart(op)


def _hold_blocks(kernels: ir.Operation, threads: int) -> None:
    for op in operations(kernels):
        if op.name == "gpu.func" and "known_block_size" in op.attributes:
            block = math.prod(ir.DenseI32ArrayAttr(op.attributes["known_block_size"]))
            count = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), max(1, threads // block))
            op.attributes["nvvm.minctasm"] = count


def _rename_scope(op: ir.Operation) -> None:
    scope = ir.StringAttr(op.attributes["syncscope"]).value
    if scope not in _SCOPES:
        unsupported(op, f"synchronisation scope {scope!r} is not one of {', '.join(filter(None, _SCOPES))}")
    op.attributes["syncscope"] = ir.StringAttr.get(_SCOPES[scope])


def _keep_apart(op: ir.Operation) -> None:
    space = ir.IntegerAttr(op.attributes["addr_space"]).value if "addr_space" in op.attributes else 0
    array = ir.TypeAttr(op.attributes["global_type"]).value
    if space == _SHARED and not str(array).startswith("!llvm.array<0 x"):
        op.attributes["linkage"] = ir.Attribute.parse("#llvm.linkage<internal>")


def last_passes(chip: str, features: str, libdevice: str, toolkit: str) -> list[str]:
    """From :func:`lower` to a module that FlyDSL's ExecutionEngine runs, with PTX inside.

    ``libdevice`` is the path of NVIDIA's device library, or empty. ``toolkit`` is a CUDA toolkit's root, and is never
    left to MLIR: it would take one from the environment, link its libdevice, and crash if it is not there.
    """
    link = f" l={libdevice}" if libdevice else ""
    return [
        "gpu.module(convert-scf-to-cf,cse,convert-gpu-to-nvvm{index-bitwidth=0 use-bare-ptr-memref-call-conv=true})",
        f"nvvm-attach-target{{chip={chip} O=3 features={features}{link}}}",
        "convert-scf-to-cf",
        "convert-cf-to-llvm",
        "gpu-to-llvm{use-bare-pointers-for-host=true use-bare-pointers-for-kernels=true}",
        "convert-vector-to-llvm",
        "convert-arith-to-llvm",
        "convert-func-to-llvm",
        "reconcile-unrealized-casts",
        f'gpu-module-to-binary{{format=isa toolkit="{toolkit}"}}',
    ]
