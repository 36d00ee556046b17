# SPDX-License-Identifier: Apache-2.0
"""Small operations that the rewriting inserts, and calls of the C runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from flydsl._mlir import ir
from flydsl._mlir.dialects import arith, func, llvm
from flydsl.compiler.diagnostics import location_chain

from flycomm.errors import UnsupportedOnTarget


def unsupported(op: ir.Operation, why: str = "") -> NoReturn:
    """Raise for an operation that has no meaning on CPU cores, naming it, its kernel and its place in the source."""
    owner = op.parent
    while owner is not None and owner.name not in ("gpu.func", "func.func"):
        owner = owner.parent
    inside = f" in {ir.StringAttr(owner.attributes['sym_name']).value}" if owner is not None else ""
    reason = f" ({why})" if why else ""
    place = ", called from ".join(f"{frame.filename}:{frame.line}" for frame in location_chain(op.location))
    raise UnsupportedOnTarget(
        f"target host cannot lower operation {op.name}{reason}{inside} at {place or 'an unknown place'}; "
        "use a target-neutral operation, or run on the target that has it"
    )


def size_of(ty: ir.Type) -> int:
    """Bytes that a value of an LLVM-compatible type takes in memory on x86-64."""
    if isinstance(ty, ir.IntegerType):
        return 1 << max(0, (ty.width + 7) // 8 - 1).bit_length()
    if isinstance(ty, ir.FloatType):
        return (ty.width + 7) // 8
    if isinstance(ty, ir.IndexType) or str(ty).startswith("!llvm.ptr"):
        return 8
    if isinstance(ty, ir.VectorType):
        count = 1
        for side in ty.shape:
            count *= side
        element = ty.element_type
        bits = element.width if isinstance(element, (ir.IntegerType, ir.FloatType)) else 64
        return (count * bits + 7) // 8
    if isinstance(ty, llvm.ArrayType):
        return ty.num_elements * size_of(ty.element_type)
    if isinstance(ty, llvm.StructType) and ty.packed:  # as all of FlyDSL's
        return sum(map(size_of, ty.body))
    raise UnsupportedOnTarget(f"target host does not know the size of a value of type {ty}; store its parts one by one")


class Builder:
    """Inserts operations before one place of a module, and declares the runtime functions it calls."""

    def __init__(self, module: ir.Module):
        self.module = module
        self.i1 = ir.IntegerType.get_signless(1)
        self.i32 = ir.IntegerType.get_signless(32)
        self.i64 = ir.IntegerType.get_signless(64)
        self.index = ir.IndexType.get()
        self.ptr = ir.Type.parse("!llvm.ptr")
        self._declared: set[str] = set()
        self._strings: dict[str, str] = {}

    def constant(self, value: int, ty: ir.Type | None = None) -> ir.Value:
        return arith.constant(ty or self.i32, value)

    def call(self, name: str, results: Sequence[ir.Type], operands: Sequence[ir.Value]) -> list[ir.Value]:
        """Call a function of csrc_shim/host_runtime.h."""
        if name not in self._declared:
            with ir.InsertionPoint.at_block_begin(self.module.body), ir.Location.unknown():
                declared = func.FuncOp(name, ([value.type for value in operands], list(results)), visibility="private")
            assert declared is not None
            self._declared.add(name)
        return list(func.CallOp(list(results), ir.FlatSymbolRefAttr.get(name), list(operands)).results)

    def call_variadic(self, name: str, operands: Sequence[ir.Value]) -> None:
        """Call a C function of type ``void(const char *, ...)``."""
        ty = ir.Type.parse("!llvm.func<void (ptr, ...)>")
        if name not in self._declared:
            with ir.InsertionPoint.at_block_begin(self.module.body), ir.Location.unknown():
                llvm.LLVMFuncOp(name, ir.TypeAttr.get(ty))
            self._declared.add(name)
        llvm.CallOp(None, list(operands), [], [], var_callee_type=ir.TypeAttr.get(ty), callee=name)

    def field(self, base: ir.Value, byte: int, ty: ir.Type) -> ir.Value:
        """Load a field of ``fc_host_thread``."""
        return llvm.LoadOp(ty, self.offset(base, byte)).result

    def offset(self, base: ir.Value, byte: int) -> ir.Value:
        if byte == 0:
            return base
        i8 = ir.IntegerType.get_signless(8)
        return llvm.GEPOp(self.ptr, base, [], [byte], i8, 0).result

    def slot(self, block: ir.Block, ty: ir.Type, count: int = 1) -> ir.Value:
        """Stack room for ``count`` values of ``ty``, taken once at the start of the function that ``block`` enters."""
        with ir.InsertionPoint.at_block_begin(block):
            return llvm.AllocaOp(self.ptr, self.constant(count, self.i64), ty).result

    def string(self, text: str) -> ir.Value:
        """The address of a constant, zero-terminated string."""
        name = self._strings.get(text)
        if name is None:
            name = self._strings[text] = f"fc_text_{len(self._strings)}"
            data = text.encode() + b"\0"
            array = ir.Type.parse(f"!llvm.array<{len(data)} x i8>")
            with ir.InsertionPoint.at_block_begin(self.module.body), ir.Location.unknown():
                llvm.GlobalOp(
                    array,
                    name,
                    ir.Attribute.parse("#llvm.linkage<private>"),
                    constant=True,
                    addr_space=0,
                    value=ir.StringAttr.get(data),
                )
        return llvm.AddressOfOp(self.ptr, ir.FlatSymbolRefAttr.get(name)).result
