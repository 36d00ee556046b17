# SPDX-License-Identifier: Apache-2.0
"""``gpu.func`` bodies become ordinary functions: a kernel's is ``void(fc_host_thread *self, void **params)``."""

from __future__ import annotations

from collections.abc import Iterator

from flydsl._mlir import ir
from flydsl._mlir.dialects import arith, cf, func, llvm

from flycomm.targets._host_lowering._build import Builder, size_of, unsupported
from flycomm.targets._host_lowering._functions import Kernel, function_name, operations, symbol
from flycomm.targets._host_lowering._memory import ACCESSES
from flycomm.targets._host_lowering._shuffles import LOWERED as SHUFFLES
from flycomm.targets._host_lowering._shuffles import wait_for_lanes

# Offsets of fc_host_thread (csrc_shim/host_runtime.h)
_THREAD, _BLOCK, _BLOCK_DIM, _GRID_DIM, _LANE, _WARP, _NUM_WARPS, _WARP_SIZE, _SHARED = (
    0,
    12,
    24,
    36,
    48,
    52,
    56,
    60,
    64,
)

_VECTORS = {"gpu.thread_id": _THREAD, "gpu.block_id": _BLOCK, "gpu.block_dim": _BLOCK_DIM, "gpu.grid_dim": _GRID_DIM}
_SCALARS = {
    "gpu.lane_id": _LANE,
    "gpu.subgroup_id": _WARP,
    "gpu.num_subgroups": _NUM_WARPS,
    "gpu.subgroup_size": _WARP_SIZE,
}
_ADDRESSES = frozenset(("llvm.mlir.addressof", "llvm.ptrtoint", "llvm.inttoptr"))
_SHARED_SPACE = 3
_MAX_REGISTER_BYTES = 64 << 10
_DYNAMIC_ALIGNMENT = 16  # bytes
_DYNAMIC_INDEX = -(2**31)  # in a getelementptr's constant indices: the next operand


class SharedLayout:
    """Where the shared arrays of one ``gpu.module`` lie in a block's shared memory; the dynamic part comes last."""

    def __init__(self) -> None:
        self.offsets: dict[str, int] = {}
        self.dynamic: set[str] = set()
        self.static_bytes = 0

    def add(self, name: str, num_bytes: int, alignment: int) -> None:
        if num_bytes == 0:
            self.dynamic.add(name)
            return
        self.offsets[name] = -(-self.static_bytes // alignment) * alignment
        self.static_bytes = self.offsets[name] + num_bytes

    def close(self) -> None:
        if self.dynamic:
            self.static_bytes = -(-self.static_bytes // _DYNAMIC_ALIGNMENT) * _DYNAMIC_ALIGNMENT
            self.offsets.update(dict.fromkeys(self.dynamic, self.static_bytes))


def lower_kernels(module: ir.Module, builder: Builder) -> list[Kernel]:
    """Empty every ``gpu.module``; returns the kernels that were in them."""
    functions: list[Kernel] = []
    for gpu_module in [op.operation for op in module.body.operations if op.operation.name == "gpu.module"]:
        module_name = symbol(gpu_module)
        layout = _move_globals(gpu_module, module, module_name)
        for op in _children(gpu_module):
            if op.name != "gpu.func":
                unsupported(op, "functions from outside the kernel")
            _check_registers(op)
            accesses = operations(op, ACCESSES.__contains__)
            function = _move_function(op, module, module_name)
            _Lowering(function, builder, layout, module_name).run()
            thread = function.regions[0].blocks[0].arguments[0]
            functions.append(Kernel(function, thread, layout.static_bytes, accesses))
        gpu_module.erase()
    return functions


def _children(gpu_module: ir.Operation) -> Iterator[ir.Operation]:
    yield from [op.operation for op in gpu_module.regions[0].blocks[0].operations]


def _check_registers(kernel: ir.Operation) -> None:
    """A kernel's register arrays live on a fiber's stack (FC_STACK_BYTES in csrc_shim/host_internal.h)."""
    total = 0
    for op in operations(kernel, lambda name: name == "llvm.alloca"):
        count = op.operands[0].owner
        number = ir.IntegerAttr(count.attributes["value"]).value if "value" in count.attributes else _MAX_REGISTER_BYTES
        total += number * size_of(ir.TypeAttr(op.attributes["elem_type"]).value)
        if total > _MAX_REGISTER_BYTES:
            unsupported(
                op, f"register arrays of {total} bytes or more a thread, over the limit of {_MAX_REGISTER_BYTES}"
            )


def _move_globals(gpu_module: ir.Operation, module: ir.Module, module_name: str) -> SharedLayout:
    layout = SharedLayout()
    for op in _children(gpu_module):
        if op.name != "llvm.mlir.global":
            continue
        space = ir.IntegerAttr(op.attributes["addr_space"]).value if "addr_space" in op.attributes else 0
        if space == 3:
            size = size_of(ir.TypeAttr(op.attributes["global_type"]).value)
            alignment = ir.IntegerAttr(op.attributes["alignment"]).value if "alignment" in op.attributes else 16
            layout.add(symbol(op), size, max(alignment, 1))
            op.erase()
        else:
            op.attributes["sym_name"] = ir.StringAttr.get(function_name(module_name, symbol(op)))
            op.detach_from_parent()
            module.body.append(op)
    layout.close()
    return layout


def _move_function(old: ir.Operation, module: ir.Module, module_name: str) -> ir.Operation:
    """The body of the kernel ``old`` as a new function of the host module, behind a block that loads its parameters."""
    ty = ir.FunctionType(ir.TypeAttr(old.attributes["function_type"]).value)
    ptr = ir.Type.parse("!llvm.ptr")
    with ir.InsertionPoint(module.body), old.location:
        new = func.FuncOp(function_name(module_name, symbol(old)), ([ptr, ptr], []))
    region = new.operation.regions[0]
    entry = region.blocks.append(ptr, ptr, arg_locs=[old.location] * 2)
    blocks = list(old.regions[0].blocks)
    for block in blocks:
        block.append_to(region)
    with ir.InsertionPoint(entry), old.location:
        values = []
        for number, wanted in enumerate(ty.inputs):
            at = llvm.GEPOp(ptr, entry.arguments[1], [], [number], ptr, 0).result
            values.append(llvm.LoadOp(wanted, llvm.LoadOp(ptr, at).result).result)
        cf.BranchOp(values, blocks[0])
    return new.operation


class _Lowering:
    """Rewrites the ``gpu`` operations of one function."""

    def __init__(self, function: ir.Operation, builder: Builder, layout: SharedLayout, module_name: str):
        self.function = function
        self.builder = builder
        self.layout = layout
        self.module_name = module_name
        self.entry = function.regions[0].blocks[0]
        self.thread = self.entry.arguments[0]
        self._fields: dict[int, ir.Value] = {}

    def run(self) -> None:
        for op in operations(self.function, lambda name: name.startswith("gpu.") or name in _ADDRESSES):
            with ir.InsertionPoint(op), op.location:
                results = self._lower(op)
            if results is None:
                continue
            for old, new in zip(op.results, results, strict=True):
                old.replace_all_uses_with(new)
            op.erase()

    def _lower(self, op: ir.Operation) -> list[ir.Value] | None:
        """The values that replace ``op``'s results; None: it stays."""
        builder = self.builder
        if op.name in _VECTORS:
            return [self._index(_VECTORS[op.name] + 4 * self._dimension(op))]
        if op.name in _SCALARS:
            return [self._index(_SCALARS[op.name])]
        if op.name == "gpu.global_id":
            side = 4 * self._dimension(op)
            first = arith.muli(self._index(_BLOCK + side), self._index(_BLOCK_DIM + side))
            return [arith.addi(first, self._index(_THREAD + side))]
        if op.name == "gpu.barrier":
            return self._barrier(op)
        if op.name in SHUFFLES:
            return SHUFFLES[op.name](builder, self.thread, op)
        if op.name == "gpu.printf":
            return self._printf(op)
        if op.name == "gpu.return":
            func.ReturnOp(list(op.operands))
            return []
        if op.name == "llvm.mlir.addressof":
            return self._address_of(op)
        if op.name == "llvm.ptrtoint":
            return self._shared_to_integer(op)
        if op.name == "llvm.inttoptr":
            return self._integer_to_shared(op)
        return unsupported(op)

    def _dimension(self, op: ir.Operation) -> int:
        return "xyz".index(str(op.attributes["dimension"]).rstrip(">")[-1])

    def _index(self, byte: int) -> ir.Value:
        """A 32-bit field of ``fc_host_thread``, loaded once at the function's start."""
        if byte not in self._fields:
            with ir.InsertionPoint.at_block_begin(self.entry):
                loaded = self.builder.field(self.thread, byte, self.builder.i32)
                self._fields[byte] = arith.index_castui(self.builder.index, loaded)
        return self._fields[byte]

    def _address_of(self, op: ir.Operation) -> list[ir.Value] | None:
        name = ir.FlatSymbolRefAttr(op.attributes["global_name"]).value
        if name not in self.layout.offsets:
            op.attributes["global_name"] = ir.FlatSymbolRefAttr.get(function_name(self.module_name, name))
            return None
        at = self.builder.offset(self._shared_base(), self.layout.offsets[name])
        return [llvm.AddrSpaceCastOp(op.results[0].type, at).result]

    def _shared_base(self) -> ir.Value:
        return self.builder.field(self.thread, _SHARED, self.builder.ptr)

    def _shared_to_integer(self, op: ir.Operation) -> list[ir.Value] | None:
        """An address in shared memory is a small number, as on GPUs: what lies before it in the block's share."""
        if llvm.PointerType(op.operands[0].type).address_space != _SHARED_SPACE:
            return None
        i64 = self.builder.i64
        at = llvm.PtrToIntOp(i64, llvm.AddrSpaceCastOp(self.builder.ptr, op.operands[0]).result).result
        before = arith.subi(at, llvm.PtrToIntOp(i64, self._shared_base()).result)
        ty = op.results[0].type
        return [before if ty == i64 else arith.trunci(ty, before)]

    def _integer_to_shared(self, op: ir.Operation) -> list[ir.Value] | None:
        ty = op.results[0].type
        if llvm.PointerType(ty).address_space != _SHARED_SPACE:
            return None
        number = op.operands[0]
        before = number if number.type == self.builder.i64 else arith.extui(self.builder.i64, number)
        i8 = ir.IntegerType.get_signless(8)
        at = llvm.GEPOp(self.builder.ptr, self._shared_base(), [before], [_DYNAMIC_INDEX], i8, 0).result
        return [llvm.AddrSpaceCastOp(ty, at).result]

    def _barrier(self, op: ir.Operation) -> list[ir.Value]:
        scope = str(op.attributes["scope"]) if "scope" in op.attributes else "workgroup"
        if len(op.operands) or "cluster" in scope:
            unsupported(op, "a named or cluster barrier")
        if "subgroup" in scope:
            wait_for_lanes(self.builder, self.thread)
        else:
            self.builder.call("fc_host_barrier", [], [self.thread])
        return []

    def _printf(self, op: ir.Operation) -> list[ir.Value]:
        """C's promotions: floats travel as f64, small integers as i32."""
        builder = self.builder
        f64 = ir.F64Type.get()
        operands = [builder.string(ir.StringAttr(op.attributes["format"]).value)]
        for value in op.operands:
            if isinstance(value.type, ir.FloatType):
                operands.append(value if value.type == f64 else arith.extf(f64, value))
            elif isinstance(value.type, ir.IndexType):
                operands.append(arith.index_cast(builder.i64, value))
            elif isinstance(value.type, ir.IntegerType) and value.type.width < 32:
                operands.append(arith.extui(builder.i32, value))
            else:
                operands.append(value)
        builder.call_variadic("fc_host_printf", operands)
        return []
