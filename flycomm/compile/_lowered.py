# SPDX-License-Identifier: Apache-2.0
"""What FlyDSL made of a launcher: device objects, launches, argument names, assembly.

FlyDSL has no public way to the bytes that it compiled; the private parts that this takes are used in this file only.
Call everything inside :func:`flycomm.targets.compiling_for`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flydsl._mlir import ir
from flydsl._mlir.dialects import gpu
from flydsl._mlir.passmanager import PassManager
from flydsl.compiler.backends import get_backend
from flydsl.compiler.jit_argument import is_type_param_annotation
from flydsl.compiler.jit_function import _create_mlir_context
from flydsl.compiler.protocol import c_abi_spec
from flydsl.expr.struct import _runtime_fields, is_struct_type
from flydsl.expr.typing import Constexpr

_CASTS = ("llvm.addrspacecast", "llvm.bitcast", "builtin.unrealized_conversion_cast")


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a launcher. ``None`` in a grid or block: the size is known at run time only."""

    binary: str  # key into Lowered.binaries
    kernel: str
    grid: tuple[int | None, int | None, int | None]  # blocks
    block: tuple[int | None, int | None, int | None]  # threads
    dynamic_shared_bytes: int | None
    names: tuple[str | None, ...]  # of the kernel's arguments: "x", "comm.rank"; None: computed by the launcher
    types: tuple[str, ...]  # "i32", "i64", "f32", "ptr", ...


@dataclass(frozen=True)
class Lowered:
    """A launcher compiled for the target and chip in force."""

    binaries: dict[str, bytes]
    launches: tuple[Launch, ...]
    source: str  # the traced module as it went into FlyDSL's passes
    hints: dict[str, Any]  # FlyDSL's compile hints


def lower(launcher: Any, arguments: Sequence[Any]) -> Lowered:
    """Compile ``launcher`` (a ``@flyc.jit`` function) for these compile-only arguments. Nothing is launched."""
    with _without_disk_cache():  # an artifact from disk has lost its source
        launcher._compile_only(*arguments)
    artifact = launcher._last_compiled[1]
    names = _argument_names(launcher._sig, arguments)
    binaries: dict[str, bytes] = {}
    launches: list[Launch] = []

    def visit(operation: Any) -> Any:
        if operation.name == "gpu.binary":
            binaries[_string(operation, "sym_name")] = _first_object(operation)
        elif operation.name == "gpu.launch_func":
            launches.append(_launch(operation.opview, names))
        return ir.WalkResult.ADVANCE

    with _create_mlir_context():
        ir.Module.parse(artifact.ir).operation.walk(visit)
    return Lowered(binaries, tuple(launches), artifact.source_ir, launcher._effective_compile_hints())


def assembly(lowered: Lowered) -> str:
    """The device code of a lowered launcher as text, from the same passes and the same LLVM as its binary."""
    texts: list[str] = []
    with _create_mlir_context():
        module = ir.Module.parse(lowered.source)
        fragments = list(get_backend().pipeline_fragments(compile_hints=lowered.hints))
        fragments[-1] = "gpu-module-to-binary{format=isa}"
        PassManager.parse(f"builtin.module({','.join(fragments)})").run(module.operation)

        def visit(operation: Any) -> Any:
            if operation.name == "gpu.binary":
                texts.append(_first_object(operation).decode())
            return ir.WalkResult.ADVANCE

        module.operation.walk(visit)
    return "\n".join(texts)


def _first_object(binary: Any) -> bytes:
    return gpu.ObjectAttr(ir.ArrayAttr(binary.attributes["objects"])[0]).object


def _string(operation: Any, attribute: str) -> str:
    return ir.StringAttr(operation.attributes[attribute]).value


def _launch(launch: Any, names: Sequence[str]) -> Launch:
    binary, kernel = ir.SymbolRefAttr(launch.kernel).value
    shared = launch.dynamicSharedMemorySize
    operands = list(launch.kernelOperands)
    return Launch(
        binary=binary,
        kernel=kernel,
        grid=(_constant(launch.gridSizeX), _constant(launch.gridSizeY), _constant(launch.gridSizeZ)),
        block=(_constant(launch.blockSizeX), _constant(launch.blockSizeY), _constant(launch.blockSizeZ)),
        dynamic_shared_bytes=0 if shared is None else _constant(shared),
        names=tuple(_name(operand, names) for operand in operands),
        types=tuple(str(operand.type).removeprefix("!llvm.") for operand in operands),
    )


def _constant(value: Any) -> int | None:
    if getattr(value.owner, "name", None) != "llvm.mlir.constant":
        return None
    return ir.IntegerAttr(value.owner.attributes["value"]).value


def _name(value: Any, names: Sequence[str]) -> str | None:
    while getattr(value.owner, "name", None) in _CASTS:
        value = value.owner.operands[0]
    if not isinstance(value.owner, ir.Block):
        return None
    index = ir.BlockArgument(value).arg_number
    return names[index] if index < len(names) else None


def _argument_names(signature: inspect.Signature, arguments: Sequence[Any]) -> list[str]:
    """A name for each argument of the compiled launcher, structs flattened, in its order."""
    bound = signature.bind(*arguments)
    names: list[str] = []
    for name, value in bound.arguments.items():
        annotation = signature.parameters[name].annotation
        if not (Constexpr.is_constexpr_annotation(annotation) or is_type_param_annotation(annotation)):
            names += _leaf_names(name, value)
    return names


def _leaf_names(name: str, value: Any) -> list[str]:
    if is_struct_type(type(value)):
        return [leaf for field, part in _runtime_fields(value) for leaf in _leaf_names(f"{name}.{field}", part)]
    try:
        slots = len(c_abi_spec(value))
    except TypeError:  # a plain Python number: FlyDSL converts it to one argument
        slots = 1
    return [name] if slots == 1 else [f"{name}.{slot}" for slot in range(slots)]


@contextmanager
def _without_disk_cache() -> Iterator[None]:
    key = "FLYDSL_RUNTIME_ENABLE_CACHE"
    before = os.environ.get(key)
    os.environ[key] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before
