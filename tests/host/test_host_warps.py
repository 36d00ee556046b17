# SPDX-License-Identifier: Apache-2.0
"""Lanes of a warp: identities, shuffles, and FlyDSL's cooperative algorithms, with warps of 32 and of 64."""

from functools import cache

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
import torch
from flydsl._mlir.dialects import gpu

from tests.host.host_target import activate, at, load, store

pytestmark = pytest.mark.host_only

MODES = ("xor", "up", "down", "idx")


@pytest.fixture(autouse=True)
def host():
    return activate()


@pytest.fixture(params=[32, 64])
def warp(request, monkeypatch):
    monkeypatch.setenv("FLYCOMM_HOST_WARP", str(request.param))
    return request.param


@flyc.kernel
def _identity_kernel(output: fx.Int64):
    t = fx.Int32(fx.thread_idx.y) * 50 + fx.Int32(fx.thread_idx.x)
    store(output, t * 4, fx.gpu.lane_id())
    store(output, t * 4 + 1, fx.Int32(gpu.subgroup_id()))
    store(output, t * 4 + 2, fx.Int32(gpu.num_subgroups()))
    store(output, t * 4 + 3, fx.Int32(fx.gpu.num_warp_threads()))


@flyc.jit
def _identity(output: fx.Int64):
    _identity_kernel(output).launch(grid=(1,), block=(50, 3))


def test_lanes_and_warps_count_x_first(warp, host):
    output = torch.zeros(150, 4, dtype=torch.int32)
    _identity(at(output))
    t = torch.arange(150, dtype=torch.int32)
    expected = torch.stack([t % warp, t // warp, torch.full_like(t, -(-150 // warp)), torch.full_like(t, warp)], 1)
    assert torch.equal(output, expected)
    assert host.capabilities(0).warp_size == warp


@cache
def _shuffle(mode, dtype, cases):
    """A launcher: row ``i`` of y is x shuffled by ``cases[i]``, an (offset, width)."""

    @flyc.kernel
    def kernel(x: fx.Int64, y: fx.Int64, threads: fx.Int32):
        t = fx.Int32(fx.thread_idx.x)
        for i in fx.range_constexpr(len(cases)):
            offset, width = cases[i]
            store(y, threads * i + t, fx.gpu.shuffle(load(x, t, dtype), offset, width, mode=mode))

    @flyc.jit
    def launch(x: fx.Int64, y: fx.Int64, threads: fx.Int32):
        kernel(x, y, threads).launch(grid=(1,), block=(threads,))

    return launch


def _expected(x, mode, offset, width, warp):
    result = x.clone()
    for t in range(x.numel()):
        lane, base = t % warp, t // warp * warp
        begin = lane // width * width
        source = {"xor": lane ^ offset, "up": lane - offset, "down": lane + offset, "idx": offset}[mode]
        low = 0 if mode == "idx" else begin
        if low <= source < begin + width and base + source < x.numel():
            result[t] = x[base + source]
    return result


@pytest.mark.parametrize("mode", MODES)
def test_shuffle(warp, mode):
    cases = tuple((offset, width) for width in (2, 8, 16, warp) for offset in (0, 1, 3, width - 1))
    for threads in (3 * warp, warp + 5):  # the last warp is whole, or has five lanes
        x = torch.arange(threads, dtype=torch.int32) * 7 + 1
        y = torch.zeros(len(cases), threads, dtype=torch.int32)
        _shuffle(mode, fx.Int32, cases)(at(x), at(y), threads)
        for (offset, width), row in zip(cases, y, strict=True):
            assert torch.equal(row, _expected(x, mode, offset, width, warp)), (width, offset, threads)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.float32, fx.Float32),
        (torch.float64, fx.Float64),
        (torch.float16, fx.Float16),
        (torch.bfloat16, fx.BFloat16),
        (torch.int64, fx.Int64),
        (torch.uint8, fx.Uint8),
    ],
)
def test_shuffle_moves_every_type(dtype, kind):
    x = torch.arange(64).to(dtype) * (3 if dtype == torch.uint8 else -3)
    y = torch.zeros_like(x)
    _shuffle("xor", kind, ((5, 32),))(at(x), at(y), 64)
    assert torch.equal(y, x[torch.arange(64) ^ 5])


@flyc.kernel
def _divergent_kernel(output: fx.Int64):
    t = fx.Int32(fx.thread_idx.x)
    if t < 8:
        store(output, t, fx.gpu.shuffle_xor(t, 1, 8))
    fx.gpu.barrier()
    if t >= 24:
        store(output, t, fx.gpu.shuffle_xor(t, 2, 8))


@flyc.jit
def _divergent(output: fx.Int64):
    _divergent_kernel(output).launch(grid=(2,), block=(32,))


def test_part_of_a_warp_may_shuffle_while_the_rest_waits_or_ended():
    output = torch.full((32,), -1, dtype=torch.int32)
    _divergent(at(output))
    t = torch.arange(32, dtype=torch.int32)
    assert torch.equal(output, torch.where(t < 8, t ^ 1, torch.where(t >= 24, t ^ 2, torch.full_like(t, -1))))


@flyc.kernel
def _vote_kernel(output: fx.Int64):
    t = fx.Int32(fx.thread_idx.x)
    wide = gpu.ballot(fx.Int64.ir_type, (t % 3 == 0).ir_value())
    store(output, t, fx.Int64(wide))
    gpu.barrier(scope=gpu.BarrierScope.Subgroup)


@flyc.jit
def _vote(output: fx.Int64):
    _vote_kernel(output).launch(grid=(1,), block=(64,))


def test_ballot(warp):
    output = torch.zeros(64, dtype=torch.int64)
    _vote(at(output))
    for t in range(64):
        lanes = range(t // warp * warp, t // warp * warp + warp)
        expected = sum(1 << (lane % warp) for lane in lanes if lane % 3 == 0)
        assert output[t].item() % 2**64 == expected


# ---- fx.coop


@flyc.kernel
def _warp_kernel(x: fx.Int64, y: fx.Int64):
    t = fx.Int32(fx.thread_idx.x)
    value = load(x, t, fx.Int32)
    store(y, t * 3, fx.coop.warp_sum(value))
    store(y, t * 3 + 1, fx.coop.warp_max(value))
    store(y, t * 3 + 2, fx.coop.warp_inclusive_sum(value))


@flyc.jit
def _warp(x: fx.Int64, y: fx.Int64):
    _warp_kernel(x, y).launch(grid=(1,), block=(128,))


def test_coop_warp_reduce_and_scan(warp):
    x = torch.randint(-100, 100, (128,), dtype=torch.int32)
    y = torch.zeros(128, 3, dtype=torch.int32)
    _warp(at(x), at(y))
    rows = x.view(-1, warp)
    spread = [
        rows.sum(1, keepdim=True).expand_as(rows),
        rows.max(1, keepdim=True).values.expand_as(rows),
        rows.cumsum(1),
    ]
    assert torch.equal(y, torch.stack([one.flatten().int() for one in spread], 1))


@cache
def _block(threads):
    @flyc.kernel
    def kernel(x: fx.Int64, y: fx.Int64):
        t = fx.Int32(fx.thread_idx.x)
        allocator = fx.SharedAllocator()
        reduce, scan = fx.coop.BlockReduce[fx.Int32, threads], fx.coop.BlockScan[fx.Int32, threads]
        room = [allocator.allocate(one.SharedStorage).peek() for one in (reduce, reduce, scan)]
        value = load(x, t, fx.Int32)
        store(y, t * 3, reduce.sum(value, storage=room[0]))
        store(y, t * 3 + 1, reduce(value, fx.ReductionOp.MAX, storage=room[1]))
        store(y, t * 3 + 2, scan.inclusive_sum(value, storage=room[2]))

    @flyc.jit
    def launch(x: fx.Int64, y: fx.Int64):
        kernel(x, y).launch(grid=(2,), block=(threads,))

    return launch


@pytest.mark.parametrize("threads", [16, 256, 1024])
def test_coop_block_reduce_and_scan(warp, threads):
    x = torch.randint(-100, 100, (threads,), dtype=torch.int32)
    y = torch.zeros(threads, 3, dtype=torch.int32)
    _block(threads)(at(x), at(y))
    expected = [x.sum().expand(threads), x.max().expand(threads), x.cumsum(0)]
    assert torch.equal(y, torch.stack([one.int() for one in expected], 1))
