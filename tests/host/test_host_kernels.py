# SPDX-License-Identifier: Apache-2.0
"""Ordinary FlyDSL kernels on the host target: arguments, geometry, shared memory, barrier, printf, clock, limits."""

import time

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
import torch
from flydsl._mlir.dialects import llvm

from flycomm.errors import TargetError
from tests.host.host_target import activate, at, load, store

pytestmark = pytest.mark.host_only


@pytest.fixture(autouse=True, params=["0", "1"], ids=["plain", "weak"])
def host(request, monkeypatch):
    monkeypatch.setenv("FLYCOMM_HOST_WEAK", request.param)
    return activate()


# ---- a kernel that knows nothing of flycomm: tensors, layouts, predicated vector copies


@flyc.kernel
def _add_kernel(a: fx.Tensor, b: fx.Tensor, c: fx.Tensor, tiled_copy: fx.TiledCopy):
    rows, columns = a.shape.unpack()
    coordinates = fx.make_view((0, 0), fx.make_identity_layout((rows, columns)))
    tile, x, y = tiled_copy.tile_mn, fx.block_idx.x, fx.block_idx.y
    mine = tiled_copy.get_slice(fx.thread_idx.x)
    from_a = mine.partition_S(fx.flat_divide(a, tile)[None, None, x, y])
    from_b = mine.partition_S(fx.flat_divide(b, tile)[None, None, x, y])
    to_c = mine.partition_D(fx.flat_divide(c, tile)[None, None, x, y])
    where = mine.partition_S(fx.flat_divide(coordinates, tile)[None, None, x, y])[(0, None), None, None]
    left, right, total = fx.make_fragment_like(from_a), fx.make_fragment_like(from_b), fx.make_fragment_like(to_c)
    inside = fx.make_fragment_like(where, dtype=fx.Boolean)
    for i in fx.range_constexpr(fx.size(inside.shape).unpack()):
        inside[i] = fx.elem_less(where[i], (rows, columns))
    atom = fx.make_copy_atom(fx.UniversalCopy128b(), fx.Float32)
    fx.copy(atom, from_a, left, pred=inside)
    fx.copy(atom, from_b, right, pred=inside)
    total.store(left.load() + right.load())
    fx.copy(atom, total, to_c, pred=inside)


@flyc.jit
def _add(a: fx.Tensor, b: fx.Tensor, c: fx.Tensor, stream: fx.Stream = fx.Stream(None)):  # noqa: B008
    atom = fx.make_copy_atom(fx.UniversalCopy128b(), fx.Float32)
    threads, values = fx.make_ordered_layout((8, 16), order=(1, 0)), fx.make_ordered_layout((1, 4), order=(0, 1))
    tiled = fx.make_tiled_copy_tv(atom, threads, values)
    tile_m, tile_n = tiled.tile_mn.unpack()
    rows, columns = a.shape.unpack()
    grid = ((rows + tile_m - 1) // tile_m, (columns + tile_n - 1) // tile_n, 1)
    _add_kernel(a, b, c, tiled).launch(grid=grid, block=(128, 1, 1), stream=stream)


def test_vector_add_on_cpu_tensors():
    a, b = torch.randn(100, 1000), torch.randn(100, 1000)
    c = torch.zeros(100, 1000)
    _add(a, b, c)
    assert torch.equal(c, a + b)


# ---- arguments


@fx.struct
class _Scale:
    factor: fx.Int32
    output: fx.Int64
    shift: fx.Constexpr[int]


@flyc.kernel
def _arguments_kernel(scale: _Scale, x: fx.Pointer, small: fx.Int8, real: fx.Float32):
    t = fx.Int32(fx.thread_idx.x)
    value = x[t] * scale.factor + fx.Int32(scale.shift) + fx.Int32(small) + fx.Int32(real * fx.Float32(2.0))
    store(scale.output, t, value)


@flyc.jit
def _arguments(scale: _Scale, x: fx.Pointer, small: fx.Int8, real: fx.Float32):
    _arguments_kernel(scale, x, small, real).launch(grid=(1,), block=(8,))


def test_structs_pointers_and_small_scalars_by_value():
    x, output = torch.arange(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    _arguments(_Scale(3, output.data_ptr(), shift=100), flyc.from_c_void_p(fx.Int32, x.data_ptr()), -7, 1.5)
    assert torch.equal(output, x * 3 + 100 - 7 + 3)


# ---- geometry


@flyc.kernel
def _geometry_kernel(output: fx.Int64):
    tx, ty, tz = fx.thread_idx.x, fx.thread_idx.y, fx.thread_idx.z
    bx, by, bz = fx.block_idx.x, fx.block_idx.y, fx.block_idx.z
    dx, dy, dz = fx.block_dim.x, fx.block_dim.y, fx.block_dim.z
    thread = (fx.Int32(tz) * fx.Int32(dy) + fx.Int32(ty)) * fx.Int32(dx) + fx.Int32(tx)
    block = (fx.Int32(bz) * fx.Int32(fx.grid_dim.y) + fx.Int32(by)) * fx.Int32(fx.grid_dim.x) + fx.Int32(bx)
    index = block * (fx.Int32(dx) * fx.Int32(dy) * fx.Int32(dz)) + thread
    place = fx.Int32(bx) + fx.Int32(by) * 10 + fx.Int32(bz) * 100 + fx.Int32(tx) * 1000 + fx.Int32(ty) * 10000
    store(output, index, place + fx.Int32(tz) * 100000 + fx.Int32(fx.grid_dim.z) * 1000000)


@flyc.jit
def _geometry(output: fx.Int64, gx: fx.Int32, gy: fx.Int32, gz: fx.Int32):
    _geometry_kernel(output).launch(grid=(gx, gy, gz), block=(5, 3, 2))


def test_three_dimensional_grids_and_blocks():
    grid = (4, 3, 2)
    output = torch.full((4 * 3 * 2 * 30,), -1, dtype=torch.int32)
    _geometry(at(output), *grid)
    z, y, x, tz, ty, tx = torch.meshgrid(*map(torch.arange, (2, 3, 4, 2, 3, 5)), indexing="ij")
    expected = x + y * 10 + z * 100 + tx * 1000 + ty * 10000 + tz * 100000 + 2 * 1000000
    assert torch.equal(output, expected.flatten().int())


def test_no_blocks_is_a_legal_launch(host):
    output = torch.full((4,), -1, dtype=torch.int32)
    _geometry(at(output), 0, 3, 2)
    host.raise_pending()
    assert (output == -1).all()


# ---- shared memory and the block barrier


@flyc.kernel
def _shared_kernel(x: fx.Int64, output: fx.Int64):
    t = fx.Int32(fx.thread_idx.x)
    allocator = fx.SharedAllocator()
    first = allocator.allocate(fx.Array[fx.Int32, 96]).peek()
    second = allocator.allocate(fx.Array[fx.Float64, 96]).peek()
    third = allocator.allocate(fx.Array[fx.Int8, 96]).peek()
    value = load(x, fx.Int32(fx.block_idx.x) * 96 + t, fx.Int32)
    first[t] = value
    second[t] = fx.Float64(value) * fx.Float64(0.5)
    third[t] = fx.Int8(t)
    fx.gpu.barrier()
    other = fx.Int32(95) - t
    total = first[other] + fx.Int32(second[other] * fx.Float64(4.0)) + fx.Int32(third[other])
    store(output, fx.Int32(fx.block_idx.x) * 96 + t, total)


@flyc.jit
def _shared(x: fx.Int64, output: fx.Int64, blocks: fx.Int32):
    _shared_kernel(x, output).launch(grid=(blocks,), block=(96,))


def test_several_shared_arrays_do_not_overlap():
    x = torch.arange(7 * 96, dtype=torch.int32)
    output = torch.zeros_like(x)
    _shared(at(x), at(output), 7)
    flipped = x.view(7, 96).flip(1)
    assert torch.equal(output.view(7, 96), flipped * 3 + torch.arange(95, -1, -1, dtype=torch.int32))


@flyc.kernel
def _dynamic_kernel(output: fx.Int64):
    t = fx.Int32(fx.thread_idx.x)
    allocator = fx.SharedAllocator(static=False)
    first = allocator.allocate(fx.Array[fx.Int32, 64]).peek()
    second = allocator.allocate(fx.Array[fx.Int32, 64]).peek()
    first[t] = t
    second[t] = t * 100
    fx.gpu.barrier()
    store(output, t, first[fx.Int32(63) - t] + second[fx.Int32(63) - t])


@flyc.jit
def _dynamic(output: fx.Int64, extra: fx.Constexpr[int]):
    _dynamic_kernel(output).launch(grid=(1,), block=(64,), smem=512 + extra)


def test_dynamic_shared_memory():
    output = torch.zeros(64, dtype=torch.int32)
    _dynamic(at(output), 0)
    assert torch.equal(output, torch.arange(63, -1, -1, dtype=torch.int32) * 101)


@flyc.kernel
def _rounds_kernel(output: fx.Int64, rounds: fx.Int32):
    t = fx.Int32(fx.thread_idx.x)
    ring = fx.SharedAllocator().allocate(fx.Array[fx.Int32, 1024]).peek()
    ring[t] = t
    fx.gpu.barrier()
    for _ in range(rounds):
        mine = ring[(t + 1) % 1024]
        fx.gpu.barrier()
        ring[t] = mine
        fx.gpu.barrier()
    store(output, t, ring[t])


@flyc.jit
def _rounds(output: fx.Int64, rounds: fx.Int32):
    _rounds_kernel(output, rounds).launch(grid=(1,), block=(1024,))


def test_barrier_separates_reads_from_writes():
    output = torch.zeros(1024, dtype=torch.int32)
    _rounds(at(output), 100)
    assert torch.equal(output, (torch.arange(1024, dtype=torch.int32) + 100) % 1024)


@flyc.kernel
def _leavers_kernel(output: fx.Int64):
    t = fx.Int32(fx.thread_idx.x)
    if t < 40:
        fx.gpu.barrier()
        store(output, t, t + 1)


@flyc.jit
def _leavers(output: fx.Int64):
    _leavers_kernel(output).launch(grid=(3,), block=(64,))


def test_barrier_does_not_wait_for_threads_that_ended():
    output = torch.zeros(40, dtype=torch.int32)
    _leavers(at(output))
    assert torch.equal(output, torch.arange(1, 41, dtype=torch.int32))


# ---- addresses in shared memory are small numbers, as on GPUs


@flyc.kernel
def _shared_address_kernel(output: fx.Int64):
    t = fx.Int32(fx.thread_idx.x)
    array = fx.SharedAllocator().allocate(fx.Array[fx.Int32, 32])
    array.peek()[t] = t * 3
    fx.gpu.barrier()
    address = fx.ptrtoint(array._ptr) + (fx.Int32(31) - t) * 4
    value = fx.generic_load(fx.inttoptr(fx.PointerType.get(fx.Int32.ir_type, fx.AddressSpace.Shared, 4), address))
    store(output, t, value)


@flyc.jit
def _shared_address(output: fx.Int64):
    _shared_address_kernel(output).launch(grid=(2,), block=(32,))


def test_shared_addresses_survive_a_round_trip_through_integers():
    output = torch.zeros(32, dtype=torch.int32)
    _shared_address(at(output))
    assert torch.equal(output, torch.arange(31, -1, -1, dtype=torch.int32) * 3)


# ---- printf and the clock


@flyc.kernel
def _printf_kernel(n: fx.Int32):
    if fx.Int32(fx.thread_idx.x) == 1:
        fx.printf("n={} half={} wide={}", n, fx.Float32(0.5), fx.Int64(1) << fx.Int64(40))


@flyc.jit
def _printf(n: fx.Int32):
    _printf_kernel(n).launch(grid=(1,), block=(2,))


def test_printf(capfd):
    _printf(-3)
    printed = capfd.readouterr().out
    assert printed.count("\n") == 1
    assert "n=-3 half=0.5" in printed
    assert str(1 << 40) in printed


@flyc.kernel
def _clock_kernel(output: fx.Int64, ticks: fx.Int64):
    first = fx.Int64(llvm.call_intrinsic(fx.Int64.ir_type, "llvm.readsteadycounter", [], [], []))
    now = first
    while now - first < ticks:
        now = fx.Int64(llvm.call_intrinsic(fx.Int64.ir_type, "llvm.readsteadycounter", [], [], []))
    store(output, fx.Int32(0), now - first)


@flyc.jit
def _clock(output: fx.Int64, ticks: fx.Int64):
    _clock_kernel(output, ticks).launch(grid=(1,), block=(1,))


def test_the_clock_runs_at_the_rate_it_claims(host):
    output = torch.zeros(1, dtype=torch.int64)
    run = flyc.compile(_clock, at(output), fx.Int64(0))
    hertz = host.capabilities(0).clock_hz
    before = time.monotonic()
    run(at(output), fx.Int64(hertz // 20))
    wall = time.monotonic() - before
    assert 0.05 <= output.item() / hertz <= wall


# ---- launches that cannot be


@flyc.kernel
def _nothing_kernel():
    fx.gpu.barrier()


@flyc.jit
def _nothing(x: fx.Int32, y: fx.Int32, smem: fx.Int32, grid: fx.Int32):
    _nothing_kernel().launch(grid=(grid,), block=(x, y), smem=smem)


@pytest.mark.parametrize(
    ("x", "y", "smem", "grid", "message"),
    [
        (33, 32, 0, 1, "1056 threads is over the limit of 1024"),
        (2048, 1, 0, 1, "a block side 1 to 1024 threads"),
        (32, 1, 300_000, 1, "300000 bytes of shared memory a block are over the limit of 262144"),
        (32, 1, 0, -1, r"grid \(-1, 1, 1\)"),
    ],
)
def test_bad_geometry_is_one_clear_sentence(host, capfd, x, y, smem, grid, message):
    _nothing(x, y, smem, grid)
    assert "flycomm: host launch of kernel" in capfd.readouterr().err
    with pytest.raises(TargetError, match=message):
        host.raise_pending()
    host.raise_pending()  # told once
    _nothing(32, 1, 0, 1)
    host.raise_pending()
