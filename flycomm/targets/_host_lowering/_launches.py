# SPDX-License-Identifier: Apache-2.0
"""``gpu.launch_func`` becomes a call of ``fc_host_launch``, which returns when the grid is done."""

from __future__ import annotations

from flydsl._mlir import ir
from flydsl._mlir.dialects import arith, func, llvm
from flydsl._mlir.dialects._ods_common import get_op_result_or_value

from flycomm.targets._host_lowering._build import Builder, unsupported
from flycomm.targets._host_lowering._functions import Kernel, function_name, operations, symbol

_TOKEN = "!gpu.async.token"


def lower_launches(module: ir.Module, builder: Builder, functions: list[Kernel], *, warp_size: int) -> None:
    """Rewrite the functions that launch."""
    shared_bytes = {symbol(function.operation): function.shared_bytes for function in functions}
    for op in operations(module.operation, lambda name: name.startswith("gpu.")):
        with ir.InsertionPoint(op), op.location:
            if op.name == "gpu.launch_func":
                _launch(op, builder, warp_size, shared_bytes)
            elif op.name != "gpu.wait":
                unsupported(op)
            for result in op.results:  # launches are done when they return: any pointer will do for a token
                result.replace_all_uses_with(llvm.ZeroOp(builder.ptr).result)
        op.erase()
    for function in operations(module.operation, lambda name: name == "func.func"):
        _pointers_for_streams(function, builder)


def _launch(op: ir.Operation, builder: Builder, warp_size: int, shared_bytes: dict[str, int]) -> None:
    launch = op.opview
    if launch.clusterSizeX is not None:
        unsupported(op, "clusters of blocks")
    name = function_name(*ir.SymbolRefAttr(op.attributes["kernel"]).value)
    entry_type = ir.FunctionType.get([builder.ptr, builder.ptr], [])
    kernel = func.ConstantOp(entry_type, ir.FlatSymbolRefAttr.get(name)).result
    address = ir.Operation.create("builtin.unrealized_conversion_cast", [builder.ptr], [kernel]).result
    start = _entry_block(op)
    operands = list(launch.kernelOperands)
    params = builder.slot(start, builder.ptr, max(1, len(operands)))
    for number, value in enumerate(operands):
        slot = builder.slot(start, value.type)
        llvm.StoreOp(value, slot)
        llvm.StoreOp(slot, builder.offset(params, 8 * number))
    sides = [launch.gridSizeX, launch.gridSizeY, launch.gridSizeZ]
    sides += [launch.blockSizeX, launch.blockSizeY, launch.blockSizeZ]
    dynamic = launch.dynamicSharedMemorySize
    builder.call(
        "fc_host_launch",
        [],
        [
            address,
            params,
            *(_as_i64(side, builder) for side in sides),
            builder.constant(shared_bytes[name], builder.i64),
            builder.constant(0, builder.i64) if dynamic is None else _as_i64(dynamic, builder),
            builder.constant(warp_size),
            builder.string(ir.SymbolRefAttr(op.attributes["kernel"]).value[-1]),
        ],
    )


def _as_i64(value: ir.Value, builder: Builder) -> ir.Value:
    value = get_op_result_or_value(value)
    if isinstance(value.type, ir.IndexType):
        return arith.index_cast(builder.i64, value)
    return value if value.type == builder.i64 else arith.extsi(builder.i64, value)


def _entry_block(op: ir.Operation) -> ir.Block:
    function = op.parent
    while function.name != "func.func":
        function = function.parent
    return function.regions[0].blocks[0]


def _pointers_for_streams(function: ir.Operation, builder: Builder) -> None:
    """Stream arguments arrive as ``!gpu.async.token``; they are null pointers here."""
    ty = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    if not any(str(wanted) == _TOKEN for wanted in ty.inputs):
        return
    inputs = [builder.ptr if str(wanted) == _TOKEN else wanted for wanted in ty.inputs]
    for block in function.regions[0].blocks:
        for argument in block.arguments:
            if str(argument.type) == _TOKEN:
                argument.set_type(builder.ptr)
    function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, list(ty.results)))
