# SPDX-License-Identifier: Apache-2.0
"""Loads, stores, atomics and fences: where fibers yield, and what the weak mode takes over."""

from __future__ import annotations

import re

from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm

from flycomm.targets._host_lowering._build import Builder, size_of, unsupported
from flycomm.targets._host_lowering._functions import Kernel, operations

_ORDER = {  # of the LLVM dialect's AtomicOrdering
    0: "not_atomic",
    1: "unordered",
    2: "monotonic",
    4: "acquire",
    5: "release",
    6: "acq_rel",
    7: "seq_cst",
}
_RELEASING = frozenset(("release", "acq_rel", "seq_cst"))
_PRIVATE_SPACES = (3, 5)  # shared and register memory: no peer sees it
_BULK = frozenset(
    ("llvm.intr.memcpy", "llvm.intr.memcpy.inline", "llvm.intr.memmove", "llvm.intr.memset", "llvm.intr.masked.store")
)
ACCESSES = frozenset(("llvm.load", "llvm.store", "llvm.atomicrmw", "llvm.cmpxchg", "llvm.fence", "llvm.call_intrinsic"))
_CLOCK = "llvm.readsteadycounter"


def refuse_access(op: ir.Operation, *, weak: bool) -> None:
    """Raise for an operation on memory that only a GPU has, or that the weak mode cannot take apart."""
    if op.name == "llvm.call_intrinsic":
        name = ir.StringAttr(op.attributes["intrin"]).value
        if name.startswith(("llvm.amdgcn.", "llvm.nvvm.")):
            unsupported(op, name)
    elif weak and op.name in _BULK:
        unsupported(op, "the weak mode sees single stores only")


def lower_memory(function: Kernel, builder: Builder, *, weak: bool) -> None:
    """Rewrite one function's accesses. A yield point comes before every atomic or volatile read."""
    accesses = _Accesses(function, builder, weak)
    for op in function.accesses:
        with ir.InsertionPoint(op), op.location:
            accesses.lower(op)


class _Accesses:
    def __init__(self, function: Kernel, builder: Builder, weak: bool):
        self.function = function
        self.builder = builder
        self.weak = weak
        self._slots: dict[ir.Type, ir.Value] = {}

    def lower(self, op: ir.Operation) -> None:
        if "nontemporal" in op.attributes:
            del op.attributes["nontemporal"]  # x86 orders such stores by no release
        if op.name == "llvm.call_intrinsic":
            self._intrinsic(op)
            return
        if op.name == "llvm.fence":
            self._release_if(op, "ordering")
        elif op.name == "llvm.load":
            self._load(op)
        elif op.name == "llvm.store":
            if self._store(op):
                return
        else:
            value = op.operands[1]
            self._release_if(op, "ordering" if op.name == "llvm.atomicrmw" else "success_ordering")
            self._call("fc_host_yield", op.operands[0], size_of(value.type))
        if "syncscope" in op.attributes:
            del op.attributes["syncscope"]  # every thread here runs in one x86 scope

    def _intrinsic(self, op: ir.Operation) -> None:
        if ir.StringAttr(op.attributes["intrin"]).value == _CLOCK:
            op.results[0].replace_all_uses_with(self.builder.call("fc_host_clock", [self.builder.i64], [])[0])
            op.erase()

    def _load(self, op: ir.Operation) -> None:
        address, ty = op.operands[0], op.results[0].type
        if _order(op, "ordering") != "not_atomic" or "volatile_" in op.attributes:
            self._call("fc_host_yield", address, size_of(ty))
        elif self.weak and _space(address) not in _PRIVATE_SPACES:
            self._call("fc_host_settle", address, size_of(ty))

    def _store(self, op: ir.Operation) -> bool:
        """Whether the store was replaced by a call."""
        value, address = op.operands
        if not self.weak or _space(address) in _PRIVATE_SPACES:
            return False
        size = size_of(value.type)
        if self._release_if(op, "ordering") or _order(op, "ordering") in _RELEASING:
            self._call("fc_host_settle", address, size)
            return False
        if value.type not in self._slots:
            self._slots[value.type] = self.builder.slot(self.function.entry, value.type)
        slot = self._slots[value.type]
        llvm.StoreOp(value, slot)
        self._call("fc_host_store", address, slot, size)
        op.erase()
        return True

    def _release_if(self, op: ir.Operation, attribute: str) -> bool:
        """In the weak mode, drain this fiber's stores before a release that reaches past the block."""
        if not self.weak or _order(op, attribute) not in _RELEASING:
            return False
        scope = ir.StringAttr(op.attributes["syncscope"]).value if "syncscope" in op.attributes else ""
        if scope.startswith(("workgroup", "wavefront", "singlethread")):
            return False
        self.builder.call("fc_host_release", [], [self.function.thread])
        return True

    def _call(self, name: str, *operands: ir.Value | int) -> None:
        """Call a runtime function with this thread, pointers and byte counts."""
        values = [self.function.thread]
        for operand in operands:
            if isinstance(operand, int):
                values.append(self.builder.constant(operand))
            elif _space(operand):
                values.append(llvm.AddrSpaceCastOp(self.builder.ptr, operand).result)
            else:
                values.append(operand)
        self.builder.call(name, [], values)


def _order(op: ir.Operation, attribute: str) -> str:
    return _ORDER[ir.IntegerAttr(op.attributes[attribute]).value] if attribute in op.attributes else "not_atomic"


def _space(pointer: ir.Value) -> int:
    return llvm.PointerType(pointer.type).address_space


_POINTER_IN_SPACE = re.compile(r"ptr<\d+>")


def flatten_address_spaces(module: ir.Module) -> None:
    """Every pointer becomes a plain one: CPU cores have one address space."""
    flat: dict[ir.Type, ir.Type] = {}

    def flattened(ty: ir.Type) -> ir.Type:
        if ty not in flat:
            text = str(ty)
            flat[ty] = ir.Type.parse(_POINTER_IN_SPACE.sub("ptr", text)) if _POINTER_IN_SPACE.search(text) else ty
        return flat[ty]

    for op in operations(module.operation):
        for result in op.results:
            result.set_type(flattened(result.type))
        for region in op.regions:
            for block in region.blocks:
                for argument in block.arguments:
                    argument.set_type(flattened(argument.type))
        for name in list(op.attributes):
            attribute = op.attributes[name]
            if isinstance(attribute, ir.TypeAttr) and flattened(attribute.value) != attribute.value:
                op.attributes[name] = ir.TypeAttr.get(flattened(attribute.value))
        if "addr_space" in op.attributes:
            op.attributes["addr_space"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 0)
    for op in operations(module.operation, lambda name: name == "llvm.addrspacecast"):
        op.results[0].replace_all_uses_with(op.operands[0])
        op.erase()


__all__ = ["ACCESSES", "flatten_address_spaces", "lower_memory", "refuse_access"]
