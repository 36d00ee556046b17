# SPDX-License-Identifier: Apache-2.0
"""Exchanges between the lanes of a warp, 64 bits at a time."""

from __future__ import annotations

from collections.abc import Callable

from flydsl._mlir import ir
from flydsl._mlir.dialects import arith, llvm

from flycomm.targets._host_lowering._build import Builder, size_of, unsupported

_MODES = {"xor": 0, "up": 1, "down": 2, "idx": 3}  # enum fc_host_shuffle_mode
_BALLOT, _FIRST = 4, 5


def _shuffle_bits(
    builder: Builder, thread: ir.Value, bits: ir.Value, offset: ir.Value, width: ir.Value, mode: int
) -> tuple[ir.Value, ir.Value]:
    """``bits`` is an i64; returns the moved i64 and whether it is another lane's, as i1."""
    pair = ir.Type.parse("!llvm.struct<(i64, i64)>")
    moved = builder.call("fc_host_shuffle", [pair], [thread, bits, offset, width, builder.constant(mode)])[0]
    value = llvm.ExtractValueOp(builder.i64, moved, [0]).result
    valid = llvm.ExtractValueOp(builder.i64, moved, [1]).result
    return value, arith.trunci(builder.i1, valid)


def _move(
    builder: Builder, thread: ir.Value, value: ir.Value, offset: ir.Value, width: ir.Value, mode: int
) -> tuple[ir.Value, ir.Value]:
    """Shuffle a value of any integer, float, pointer or one-dimensional vector type."""
    ty = value.type
    if isinstance(ty, ir.VectorType):
        words = size_of(ty) // 4
        if size_of(ty) % 4:
            unsupported(value.owner, f"a shuffle of {ty}")
        packed = ir.VectorType.get([words], builder.i32)
        bits = llvm.BitcastOp(packed, value).result
        valid = builder.constant(1, builder.i1)
        result = llvm.UndefOp(packed).result
        for number in range(words):
            word = llvm.ExtractElementOp(bits, builder.constant(number)).result
            moved, valid = _move(builder, thread, word, offset, width, mode)
            result = llvm.InsertElementOp(result, moved, builder.constant(number)).result
        return llvm.BitcastOp(ty, result).result, valid
    if str(ty).startswith("!llvm.ptr"):
        bits, valid = _shuffle_bits(builder, thread, llvm.PtrToIntOp(builder.i64, value).result, offset, width, mode)
        return llvm.IntToPtrOp(ty, bits).result, valid
    if isinstance(ty, ir.IndexType):
        bits, valid = _shuffle_bits(builder, thread, arith.index_cast(builder.i64, value), offset, width, mode)
        return arith.index_cast(ty, bits), valid
    number = ir.IntegerType.get_signless(ty.width)
    bits = arith.bitcast(number, value) if isinstance(ty, ir.FloatType) else value
    wide = arith.extui(builder.i64, bits) if ty.width < 64 else bits
    moved, valid = _shuffle_bits(builder, thread, wide, offset, width, mode)
    narrow = arith.trunci(number, moved) if ty.width < 64 else moved
    return (arith.bitcast(ty, narrow) if isinstance(ty, ir.FloatType) else narrow), valid


def _shuffle(builder: Builder, thread: ir.Value, op: ir.Operation) -> list[ir.Value]:
    mode = str(op.attributes["mode"]).rstrip(">").split()[-1]
    value, offset, width = op.operands
    return list(_move(builder, thread, value, offset, width, _MODES[mode]))


def _ballot(builder: Builder, thread: ir.Value, op: ir.Operation) -> list[ir.Value]:
    zero = builder.constant(0)
    predicate = arith.extui(builder.i64, op.operands[0])
    bits, _ = _shuffle_bits(builder, thread, predicate, zero, zero, _BALLOT)
    width = ir.IntegerType(op.results[0].type).width
    return [bits if width == 64 else arith.trunci(op.results[0].type, bits)]


def _broadcast(builder: Builder, thread: ir.Value, op: ir.Operation) -> list[ir.Value]:
    zero = builder.constant(0)
    specific = len(op.operands) == 2
    lane = op.operands[1] if specific else zero
    return [_move(builder, thread, op.operands[0], lane, zero, _MODES["idx"] if specific else _FIRST)[0]]


def wait_for_lanes(builder: Builder, thread: ir.Value) -> None:
    """A barrier of one warp: an exchange whose values nobody wants."""
    zero = builder.constant(0)
    _shuffle_bits(builder, thread, builder.constant(0, builder.i64), zero, zero, _FIRST)


LOWERED: dict[str, Callable[[Builder, ir.Value, ir.Operation], list[ir.Value]]] = {
    "gpu.shuffle": _shuffle,
    "gpu.ballot": _ballot,
    "gpu.subgroup_broadcast": _broadcast,
}
