# SPDX-License-Identifier: Apache-2.0
"""``all_reduce_rms_norm`` as a call: fused or not, the same contract; the kernel itself has a test file of its own."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

import flycomm.ops  # noqa: F401  (registers the ops)
from flycomm import tables, targets
from flycomm.dtypes import REDUCIBLE
from flycomm.errors import UsageError
from tests.host.norm_reference import quantize, rms_norm, rms_norm_exact
from tests.ranks import DTYPES, rank_order_sum, run, same_bits, sample, sharing

EPS = 1e-5
ENOUGH = {"max_bytes": 48 << 20}


def inputs(comm, rows, hidden, dtype, seed=0):
    x = sample(comm, (rows, hidden), dtype, seed)
    residual = sample(comm, (rows, hidden), dtype, 100 + seed, rank=0)
    return x, residual, sample(comm, (hidden,), dtype, 200 + seed, rank=0)


def added(comm, rows, hidden, dtype, residual, seed=0):
    return rank_order_sum(comm, (rows, hidden), dtype, seed).cpu().float() + residual.cpu().float()


@pytest.mark.parametrize(
    ("world", "dtype", "gemma"), [(1, "bf16", False), (2, "f16", True), (3, "f32", False), (4, "bf16", True)]
)
def test_fused_where_the_table_has_a_row(world, dtype, gemma):
    def body(comm):
        for seed, (rows, hidden) in enumerate(((1, 512), (3, 1024), (16, 256), (48, 64))):
            x, residual, weight = inputs(comm, rows, hidden, DTYPES[dtype], seed)
            assert comm.plan_rms_norm(x.dtype, rows, hidden).row is not None
            normed, out = comm.all_reduce_rms_norm(x, residual, weight, EPS, gemma)
            total = added(comm, rows, hidden, DTYPES[dtype], residual, seed)
            assert same_bits(out.cpu(), total.to(x.dtype))
            want = rms_norm(total, weight.cpu(), EPS, REDUCIBLE[dtype].per_fragment, gemma)
            assert same_bits(normed.cpu(), want.to(x.dtype))

    crowded = targets.pick().runtime.torch_device_type != "cpu" and sharing(world) > 1
    run(world, body, **ENOUGH, table=table(1 << 18) if crowded else None)  # two of the shipped grid do not fit a GPU


@pytest.mark.parametrize("shape", [(3, 130), (2, 20_000), (300, 512), (2, 2, 64)])
def test_separate_kernels_where_it_has_none(shape):
    def body(comm):
        x = sample(comm, shape, torch.bfloat16, 1)
        residual, weight = sample(comm, shape, torch.bfloat16, 2, 0), sample(comm, shape[-1:], torch.float32, 3, 0)
        normed, out = comm.all_reduce_rms_norm(x, residual, weight)
        total = rank_order_sum(comm, shape, torch.bfloat16, 1).float() + residual.float()
        assert same_bits(out, total.to(x.dtype))
        exact = rms_norm_exact(total.cpu(), weight.cpu(), 1e-6)
        assert torch.allclose(normed.cpu().double(), exact, rtol=2**-8, atol=1e-6)
        assert normed.shape == shape

    run(2, body, **ENOUGH)


@cache
def table(largest, all_reduce="flags"):
    """Path of a table whose one kernel takes up to ``largest`` bytes, on a grid of fewer blocks than rows."""
    arch = targets.pick().capabilities(0).arch
    protocols = {"all_reduce": all_reduce}
    rows = [tables.Row(op, (1, 8), "any", None, protocols.get(op, "flags"), 8, 64, 1 << 18) for op in tables.OPS]
    fused = tables.Row(tables.FUSED[0], (1, 8), "any", largest, "flags", 8, 64, 1 << 18)
    path = Path(tempfile.mkdtemp(dir=os.environ["FLYDSL_RUNTIME_CACHE_DIR"])) / "table.json"  # goes with that
    path.write_text(tables.Table(arch, "made", "for a test", (*rows, fused)).to_json())
    return path


@pytest.mark.parametrize("rows", [1, 16, 17, 48, 100])
def test_the_table_decides_up_to_which_rows_it_is_one_kernel(rows):
    """The same contract on both sides: equal sums, and norms that differ by a rounding at most."""
    hidden, dtype, most = 136, torch.bfloat16, 17

    def body(comm, fused):
        x, residual, weight = inputs(comm, rows, hidden, dtype)
        assert (comm.plan_rms_norm(dtype, rows, hidden).protocol == "flags") == fused
        normed, out = (one.cpu() for one in comm.all_reduce_rms_norm(x, residual, weight, EPS))
        total = added(comm, rows, hidden, dtype, residual)
        assert same_bits(out, total.to(dtype))
        want = rms_norm(total, weight.cpu(), EPS, REDUCIBLE["bf16"].per_fragment).to(dtype)
        assert same_bits(normed, want) if fused else torch.allclose(normed, want, rtol=2**-7, atol=0)

    run(2, body, True, table=table(1 << 18))
    run(2, body, rows <= most, table=table(most * hidden * dtype.itemsize))


@pytest.mark.parametrize("world", [2, 3])
def test_it_shares_one_channel_with_two_shots_and_gathers(world):
    """As the shipped tables have it: one grid and capacity by flags for all of them."""

    def body(comm):
        keys = {key for key in comm._session.channels.peers if key.wire == "flags" and not key.captured}
        assert len(keys) == 1
        for seed in range(8):
            rows, hidden = (1, 3, 17)[seed % 3], (64, 136)[seed % 2]
            x, residual, weight = inputs(comm, rows, hidden, torch.bfloat16, seed)
            assert comm.plan_rms_norm(x.dtype, rows, hidden).protocol == "flags"
            _, out = comm.all_reduce_rms_norm(x, residual, weight, EPS)
            assert same_bits(out.cpu(), added(comm, rows, hidden, torch.bfloat16, residual, seed).to(x.dtype))
            if seed % 4:
                size = 50 + 1000 * seed
                plan = comm.plan("all_reduce", torch.float32, 4 * size)
                assert plan.protocol == "two_shot"
                total = comm.all_reduce(sample(comm, (size,), torch.float32, 50 + seed))
                assert same_bits(total, rank_order_sum(comm, (size,), torch.float32, 50 + seed))
            if seed % 3 == 1:
                parts = [sample(comm, (77,), torch.float32, 80 + seed, rank) for rank in range(world)]
                assert same_bits(comm.all_gather_into_tensor(parts[comm.rank]), torch.cat(parts))

    run(world, body, table=table(1 << 18, "two_shot"))


@pytest.mark.parametrize("how", ["static", "token", "group"])
@pytest.mark.parametrize("fused", [True, False])
def test_eight_bits(how, fused):
    rows, hidden = 5, 512 if fused else 516

    def body(comm):
        x, residual, weight = inputs(comm, rows, hidden, torch.bfloat16)
        assert (comm.plan_rms_norm(x.dtype, rows, hidden).row is not None) == fused
        scale = torch.full((1,), 0.03, device=comm.device) if how == "static" else None
        codes, scales, out = comm.all_reduce_rms_norm_quant(x, residual, weight, how, scale, EPS)
        normed, plain = comm.all_reduce_rms_norm(x, residual, weight, EPS)
        assert same_bits(out, plain)
        assert codes.dtype == comm.fp8
        wanted, divisors = quantize(normed.cpu().float(), how, comm._fused._fp8, 1.0 / (448 * 512), 0.03)
        assert torch.equal(scales.cpu().flatten(), divisors.flatten())
        assert torch.equal(codes.cpu().view(torch.uint8), wanted.view(torch.uint8))
        name = comm.group_name
        again = torch.ops.flycomm.all_reduce_rms_norm_quant(x, residual, weight, how, scale, EPS, False, name)
        assert torch.equal(again[0].view(torch.uint8), codes.view(torch.uint8))

    run(2, body, **ENOUGH)


def test_the_op_and_its_fake():
    def body(comm):
        x, residual, weight = inputs(comm, 2, 256, torch.float16)
        op = torch.ops.flycomm.all_reduce_rms_norm
        got = op(x, residual, weight, EPS, False, comm.group_name)
        want = comm.all_reduce_rms_norm(x, residual, weight, EPS)
        assert all(same_bits(left, right) for left, right in zip(got, want, strict=True))

    run(2, body, **ENOUGH)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(3, 8)
        normed, out = torch.ops.flycomm.all_reduce_rms_norm(x, x, torch.empty(8), EPS, False, "nobody")
        assert normed.shape == out.shape == x.shape


def test_strided_inputs_and_other_calls_in_between():
    def body(comm):
        x, residual, weight = inputs(comm, 6, 256, torch.bfloat16)
        want = comm.all_reduce_rms_norm(x, residual, weight)
        for _ in range(3):
            comm.all_reduce(x)
            got = comm.all_reduce_rms_norm(x.t().contiguous().t(), residual, weight)
            assert all(same_bits(left, right) for left, right in zip(got, want, strict=True))

    run(3, body, **ENOUGH)


def test_bad_input_is_one_sentence():
    def body(comm):
        x, residual, weight = inputs(comm, 2, 64, torch.bfloat16)
        for call, words in (
            (lambda: comm.all_reduce_rms_norm(x, residual[:1], weight), "pass a residual that is like the input"),
            (lambda: comm.all_reduce_rms_norm(x, residual, weight[:9]), r"pass \(64,\) of the input's type or float32"),
            (lambda: comm.all_reduce_rms_norm_quant(x, residual, weight, "row"), "is not one of none, static"),
            (lambda: comm.all_reduce_rms_norm_quant(x, residual, weight, "static"), "a scale goes with 'static'"),
            (lambda: comm.all_reduce_rms_norm_quant(x, residual, weight, "none"), "call the op without _quant"),
        ):
            with pytest.raises(UsageError, match=words):
                call()

    run(2, body, **ENOUGH)
