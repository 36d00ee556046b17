# SPDX-License-Identifier: Apache-2.0
"""Small FlyDSL kernels that know nothing of flycomm, for what the cuda target makes of them."""

from __future__ import annotations

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir.dialects import llvm

DEFAULT_STREAM = fx.Stream(None)
RELAXED, ACQUIRE, RELEASE = (getattr(fx.AtomicOrdering, name) for name in ("Monotonic", "Acquire", "Release"))


def at(address: Any, dtype: Any, alignment: int = 0) -> Any:
    kind = fx.PointerType.get(dtype.ir_type, fx.AddressSpace.Global, alignment or dtype.width // 8)
    return fx.inttoptr(kind, address)


def store(address: Any, index: Any, value: Any) -> None:
    fx.generic_store(at(address + fx.Int64(index) * (value.dtype.width // 8), value.dtype), value)


@flyc.kernel
def shared_kernel(out: fx.Int64):
    t = fx.Int32(fx.thread_idx.x)
    allocator = fx.SharedAllocator()
    first = allocator.allocate(fx.Array[fx.Float32, 64]).peek()
    second = allocator.allocate(fx.Array[fx.Int32, 64]).peek()
    first[t] = fx.Float32(t) + 0.5
    second[t] = t * 3
    fx.gpu.barrier()
    store(out, t, first[63 - t] + fx.Float32(second[63 - t]))


@flyc.jit
def shared(out: fx.Int64, stream: fx.Stream = DEFAULT_STREAM):
    shared_kernel(out).launch(grid=(1,), block=(64,), stream=stream)


@flyc.kernel
def dynamic_kernel(out: fx.Int64):
    t = fx.Int32(fx.thread_idx.x)
    allocator = fx.SharedAllocator(static=False)
    first = allocator.allocate(fx.Array[fx.Float32, 16384]).peek()  # 64 KiB: over what needs no asking
    second = allocator.allocate(fx.Array[fx.Int32, 64]).peek()
    first[t * 256] = fx.Float32(t) + 0.5
    second[t] = t * 3
    fx.gpu.barrier()
    store(out, t, first[(63 - t) * 256] + fx.Float32(second[63 - t]))


@flyc.jit
def dynamic(out: fx.Int64, stream: fx.Stream = DEFAULT_STREAM):
    dynamic_kernel(out).launch(grid=(1,), block=(64,), stream=stream)


@flyc.kernel
def orders_kernel(out: fx.Int64):
    word = at(out, fx.Uint64)
    value = fx.generic_load(word, memory_order=RELAXED)
    fx.generic_store(word, value, memory_order=RELAXED)
    value = fx.generic_load(word, memory_order=ACQUIRE)
    fx.generic_store(word, value, memory_order=RELEASE)
    fx.memory_fence(ordering=ACQUIRE)
    four = at(out + 64, fx.Uint32, 16)
    fx.generic_store(four, fx.generic_load(four, count=4, volatile=True), volatile=True)
    fx.atomic_cas(word, fx.Uint64(1), fx.Uint64(2))


@flyc.jit
def orders(out: fx.Int64, stream: fx.Stream = DEFAULT_STREAM):
    orders_kernel(out).launch(grid=(1,), block=(32,), stream=stream)


@flyc.kernel
def scopes_kernel(out: fx.Int64):
    word = at(out, fx.Uint32)
    fx.atomic_add(word, fx.Uint32(1))
    fx.atomic_add(word, fx.Uint32(2), syncscope=fx.rocdl.SyncScope.Agent)
    fx.atomic_add(word, fx.Uint32(3), syncscope=fx.rocdl.SyncScope.Workgroup)
    fx.memory_fence(ordering=RELEASE)
    fx.memory_fence(ordering=RELEASE, syncscope=fx.rocdl.SyncScope.Agent)
    fx.memory_fence(ordering=RELEASE, syncscope=fx.rocdl.SyncScope.Workgroup)


@flyc.jit
def scopes(out: fx.Int64, stream: fx.Stream = DEFAULT_STREAM):
    scopes_kernel(out).launch(grid=(1,), block=(32,), stream=stream)


@flyc.kernel
def sum_kernel(source: fx.Int64, out: fx.Int64, ranks: fx.Constexpr[int]):
    total = fx.Vector.filled(8, 0.0, fx.Float32)
    for rank in fx.range_constexpr(ranks):
        total = total + fx.generic_load(at(source + 4096 * rank, fx.BFloat16, 16), count=8).to(fx.Float32)
    fx.generic_store(at(out, fx.BFloat16, 16), total.to(fx.BFloat16))


@flyc.jit
def rank_sum(source: fx.Int64, out: fx.Int64, ranks: fx.Constexpr[int], stream: fx.Stream = DEFAULT_STREAM):
    sum_kernel(source, out, ranks).launch(grid=(1,), block=(32,), stream=stream)


@flyc.kernel
def multiply_add_kernel(x: fx.Float32, y: fx.Float32, out: fx.Int64):
    store(out, fx.Int32(0), x * y + x)


@flyc.jit
def multiply_add(x: fx.Float32, y: fx.Float32, out: fx.Int64, stream: fx.Stream = DEFAULT_STREAM):
    multiply_add_kernel(x, y, out).launch(grid=(1,), block=(1,), stream=stream)


@flyc.kernel
def coop_kernel(out: fx.Int64):
    reduce, scan = fx.coop.BlockReduce[fx.Float32, 256], fx.coop.BlockScan[fx.Int32, 256]
    allocator = fx.SharedAllocator()
    reduce_storage = allocator.allocate(reduce.SharedStorage).peek()
    scan_storage = allocator.allocate(scan.SharedStorage).peek()
    t = fx.Int32(fx.thread_idx.x)
    total = reduce.sum(fx.Float32(t), storage=reduce_storage)
    store(out, t, total + fx.Float32(scan.inclusive_sum(t, storage=scan_storage)))


@flyc.jit
def coop(out: fx.Int64, stream: fx.Stream = DEFAULT_STREAM):
    coop_kernel(out).launch(grid=(1,), block=(256,), stream=stream)


@flyc.kernel
def speak_kernel(out: fx.Int64):
    block = fx.Int32(fx.block_idx.y) * fx.Int32(fx.grid_dim.x) + fx.Int32(fx.block_idx.x)
    store(out, block, fx.Int64(llvm.call_intrinsic(fx.Int64.ir_type, "llvm.readsteadycounter", [], [], [])))
    fx.printf("block {}", block)


@flyc.jit
def speak(out: fx.Int64, stream: fx.Stream = DEFAULT_STREAM):
    speak_kernel(out).launch(grid=(2, 3), block=(1,), stream=stream)


@flyc.kernel
def math_kernel(x: fx.Float32, out: fx.Int64):
    for index, value in enumerate((fx.math.sqrt(x), fx.math.rsqrt(x), fx.math.exp2(x), fx.math.floor(x))):
        store(out, fx.Int32(index), value)


@flyc.jit
def math(x: fx.Float32, out: fx.Int64, stream: fx.Stream = DEFAULT_STREAM):
    math_kernel(x, out).launch(grid=(1,), block=(1,), stream=stream)


@flyc.kernel
def exp_kernel(x: fx.Float32, out: fx.Int64):
    store(out, fx.Int32(0), fx.math.exp(x))


@flyc.jit
def exp(x: fx.Float32, out: fx.Int64, stream: fx.Stream = DEFAULT_STREAM):
    exp_kernel(x, out).launch(grid=(1,), block=(1,), stream=stream)


@flyc.kernel
def amd_kernel(out: fx.Int64):
    fx.rocdl.s_waitcnt(vmcnt=0)
    store(out, fx.Int32(0), fx.Int32(1))


@flyc.jit
def amd(out: fx.Int64, stream: fx.Stream = DEFAULT_STREAM):
    amd_kernel(out).launch(grid=(1,), block=(1,), stream=stream)


@flyc.kernel
def add_kernel(first: fx.Int64, count: fx.Int32, third: fx.Float32):
    store(first, fx.Int32(fx.thread_idx.x), fx.Float32(count) + third)


@flyc.jit
def add(first: fx.Int64, count: fx.Int32, third: fx.Float32, blocks: fx.Int32, stream: fx.Stream = DEFAULT_STREAM):
    add_kernel(first, count, third).launch(grid=(blocks, 2), block=(64,), stream=stream)
