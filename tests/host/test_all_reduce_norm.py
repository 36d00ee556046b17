# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual + RMSNorm (+ 8 bits) in one kernel: the bits of the all-reduce and of one kernel a step."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from flycomm import tables, targets
from flycomm.dtypes import REDUCIBLE
from flycomm.errors import CommTimeout, UsageError
from flycomm.kernels import Specialization, compiled, reduce_norm
from flycomm.kernels.reduce_norm import Variant, slot_bytes
from flycomm.primitives.quant import E4M3FN, E4M3FNUZ
from tests.host.norm_reference import quantize, rms_norm, rms_norm_exact
from tests.ranks import DTYPES, rank_order_sum, run, same_bits, sample

BLOCKS, THREADS = 2, 64
HIDDEN = 1536  # of the class: 3 fragments of 16 bits a thread, 6 of f32
ROWS = 5
EPS = 1e-5
PLAIN = Variant(HIDDEN)
PROTOCOLS = ("flags", "packets", "sentinel")


@cache
def specialization(protocol, variant, world, dtype, blocks=BLOCKS, threads=THREADS):
    return Specialization("fused", reduce_norm.build(protocol, variant), world, dtype, blocks, threads)


class Fused:
    """The kernel on one rank's communicator."""

    def __init__(self, comm, protocol, variant, dtype, blocks=BLOCKS, threads=THREADS):
        self.comm, self.variant, self.dtype = comm, variant, dtype
        self.kernel = compiled(specialization(protocol, variant, comm.world_size, dtype, blocks, threads))
        self.peers = sentinel_channel(comm) if protocol == "sentinel" else comm.peers("fused")
        assert self.peers.blocks == blocks
        self.weight = DTYPES[variant.weight or dtype]

    def inputs(self, seed, rows, hidden):
        x = sample(self.comm, (rows, hidden), DTYPES[self.dtype], seed)
        residual = sample(self.comm, (rows, hidden), DTYPES[self.dtype], 500 + seed, 0)
        return x, residual, sample(self.comm, (hidden,), self.weight, 900 + seed, 0)

    def launch(self, x, residual, weight, scales=None, residual_out=None, out=None):
        rows, hidden = x.shape
        residual_out = torch.full_like(x, 7) if residual_out is None else residual_out
        out = torch.full_like(x, 7) if out is None else out
        codes = torch.full((rows, hidden), 0xAA, dtype=torch.uint8, device=x.device)
        if scales is None:
            scales = torch.full((rows, -(-hidden // 128)), 7.0, device=x.device)
        addresses = [t.data_ptr() for t in (x, residual, weight, residual_out, out, codes, scales)]
        self.kernel(self.peers, 1, *addresses, 0, 0, 0, rows, hidden, EPS, self.comm.stream())
        return residual_out, out, codes, scales

    def __call__(self, *args, **options):
        results = self.launch(*args, **options)
        self.comm.check()
        return results

    def check(self, seed, rows, hidden):
        """One call, against the formulas."""
        v, dtype = self.variant, DTYPES[self.dtype]
        x, residual, weight = self.inputs(seed, rows, hidden)
        static = torch.full((1,), 0.03, device=x.device) if v.quantize == "static" else None
        residual_out, out, codes, scales = (t.cpu() for t in self(x, residual, weight, static))
        total = rank_order_sum(self.comm, (rows, hidden), dtype, seed).cpu()
        added = total.float() + residual.cpu().float()
        assert same_bits(residual_out, added.to(dtype))
        want = rms_norm(added, weight.cpu(), EPS, REDUCIBLE[self.dtype].per_fragment, v.gemma).to(dtype)
        exact = rms_norm_exact(added, weight.cpu(), EPS, v.gemma)
        assert torch.allclose(want.double(), exact, rtol=torch.finfo(dtype).eps / 2 + 5e-7, atol=1e-7)
        assert same_bits(out, want if v.normed else torch.full_like(out, 7))
        if v.quantize == "none":
            assert (codes == 0xAA).all()
            return
        want_codes, want_scales = quantize(want.float(), v.quantize, v.fp8, v.floor, 0.03)
        assert torch.equal(codes, want_codes)
        assert same_bits(scales.flatten()[: want_scales.numel()], want_scales.flatten())
        assert (scales.flatten()[want_scales.numel() :] == 7).all()


def sentinel_channel(comm):
    """The channel of the table below, for calls that are not captured: three buffers, filled with the sentinel."""
    channels = comm._session.channels.peers
    (peers,) = [peers for key, peers in channels.items() if key.wire == "sentinel" and not key.captured]
    return peers


@cache
def sentinel_table(blocks, threads, needed):
    """Path of a table whose all-reduces up to ``needed`` bytes go by sentinel on this grid, and all else by flags."""
    arch = targets.pick().capabilities(0).arch
    rows = [tables.Row(op, (1, 8), "any", None, "flags", blocks, threads, 1 << 16) for op in tables.OPS]
    sums = tables.Row("all_reduce", (1, 8), "any", needed, "sentinel", blocks, threads, needed)
    path = Path(tempfile.mkdtemp(dir=os.environ["FLYDSL_RUNTIME_CACHE_DIR"])) / "table.json"  # goes with that
    path.write_text(tables.Table(arch, "made", "for a test", (sums, *rows)).to_json())
    return path


def fused(world, protocol, body, variant=PLAIN, dtype="bf16", blocks=BLOCKS, threads=THREADS, **options):
    """``body(Fused)`` on every rank."""
    needed = slot_bytes(ROWS, variant.hidden, dtype, blocks, threads)
    if protocol == "sentinel":
        options["table"] = sentinel_table(blocks, threads, -(-needed // 4096) * 4096)
    return run(
        world,
        lambda comm: body(Fused(comm, protocol, variant, dtype, blocks, threads)),
        kernel_channels={"fused": (blocks, needed * (2 if protocol == "packets" else 1))},
        **options,
    )


@pytest.mark.parametrize(
    ("world", "protocol", "dtype", "variant"),
    [
        (1, "flags", "bf16", Variant(HIDDEN)),
        (1, "packets", "f16", Variant(HIDDEN, quantize="token")),
        (1, "sentinel", "f32", Variant(HIDDEN)),
        (2, "flags", "bf16", Variant(HIDDEN, quantize="group", normed=False)),
        (2, "packets", "bf16", Variant(HIDDEN, weight="f32", gemma=True)),
        (2, "sentinel", "f16", Variant(HIDDEN, quantize="static", fp8=E4M3FNUZ)),
        (3, "flags", "f32", Variant(HIDDEN, gemma=True, quantize="token")),
        (3, "packets", "bf16", Variant(HIDDEN, quantize="token", fp8=E4M3FNUZ, normed=False)),
        (3, "sentinel", "bf16", Variant(HIDDEN, weight="f32")),
        (4, "flags", "f16", Variant(HIDDEN, weight="f32", quantize="static")),
        (4, "packets", "f32", Variant(HIDDEN, quantize="group")),
        (4, "sentinel", "bf16", Variant(HIDDEN, gemma=True, quantize="group", fp8=E4M3FN)),
        (8, "flags", "bf16", Variant(HIDDEN)),
        (8, "packets", "bf16", Variant(HIDDEN, quantize="group")),
        (8, "sentinel", "bf16", Variant(HIDDEN, quantize="token")),
    ],
    ids=lambda value: value.quantize if isinstance(value, Variant) else str(value),
)
def test_it_is_the_formula_to_the_bit_call_after_call(world, protocol, dtype, variant):
    """Rows fewer and more than blocks, rows shorter than the class: slots rest, and are used again."""

    def body(kernel):
        for seed, (rows, hidden) in enumerate([(1, 512), (ROWS, HIDDEN), (2, 1000), (3, 512), (1, HIDDEN), (4, 8)]):
            kernel.check(seed, rows, hidden)

    fused(world, protocol, body, variant, dtype)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_all_reduce_alone_gives_the_same_sum(protocol):
    def body(kernel):
        x, residual, weight = kernel.inputs(1, 3, 1024)
        summed = kernel.comm.all_reduce(x)
        residual_out, out, _, _ = kernel(x, residual, weight)
        assert same_bits(residual_out, (summed.float() + residual.float()).to(x.dtype))
        return residual_out.cpu(), out.cpu()

    results = fused(3, protocol, body)
    assert all(same_bits(a, b) for pair in results for a, b in zip(pair, results[0], strict=True))


def test_no_bit_depends_on_the_protocol_the_grid_or_the_batch():
    def body(kernel):
        x, residual, weight = kernel.inputs(2, 4, 1024)
        alone = [kernel(x[i : i + 1].clone(), residual[i : i + 1].clone(), weight)[1] for i in range(4)]
        together = kernel(x, residual, weight)[1]
        assert same_bits(torch.cat(alone), together)
        return together.cpu()

    results = [fused(2, protocol, body)[0] for protocol in PROTOCOLS]
    results += [fused(2, "flags", body, blocks=1, threads=128)[0], fused(2, "packets", body, blocks=4, threads=256)[0]]
    assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize(
    ("world", "protocol", "dtype", "variants"),
    [
        (2, "sentinel", "bf16", (Variant(1024, exact=True, single=True), Variant(HIDDEN, single=True), PLAIN)),
        (3, "packets", "f16", (Variant(1024, "f32", exact=True, single=True, quantize="group"), Variant(1024))),
        (2, "flags", "f32", (Variant(1024, exact=True), Variant(1024, single=True, quantize="token"))),
        (2, "packets", "bf16", (Variant(1000, exact=True, single=True, quantize="token"), Variant(HIDDEN))),
    ],
    ids=lambda value: value[0].name if isinstance(value, tuple) else str(value),
)
def test_kernels_of_one_size_and_of_few_rows_share_a_channel(world, protocol, dtype, variants):
    """They are the formula to the bit, and a block without a row is no less in step."""

    def body(kernel):
        kernels = [Fused(kernel.comm, protocol, variant, dtype) for variant in variants]
        for seed in range(8):
            one = kernels[seed * seed % len(kernels)]
            rows = seed % (BLOCKS if one.variant.single else ROWS) + 1
            one.check(seed, rows, one.variant.hidden if one.variant.exact else (512, 1000)[seed % 2])

    fused(world, protocol, body, replace(variants[0], hidden=HIDDEN, exact=False), dtype)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_outputs_may_be_the_inputs(protocol):
    def body(kernel):
        for seed in range(3):
            x, residual, weight = kernel.inputs(seed, ROWS, 1024)
            want = [t.clone() for t in kernel(x, residual, weight)[:2]]
            ours = x.clone(), residual.clone()
            got = kernel(*ours, weight, residual_out=ours[1], out=ours[0])
            assert same_bits(got[0], want[0])
            assert same_bits(got[1], want[1])
            got = kernel(x, residual, weight, residual_out=x, out=residual)
            assert same_bits(got[0], want[0])
            assert same_bits(got[1], want[1])

    fused(2, protocol, body)


def test_it_shares_a_channel_with_the_all_reduce():
    """The slots of rows are dealt out like those of flat tensors, so what one clears the other has used."""

    def body(kernel):
        comm = kernel.comm
        size = slot_bytes(ROWS, HIDDEN, "bf16", BLOCKS, THREADS) // 2
        assert comm.plan("all_reduce", torch.bfloat16, 2 * size, captured=False).row.protocol == "sentinel"
        for seed in range(8):
            kernel.check(seed, 1 + seed % ROWS, HIDDEN if seed % 3 else 512)
            if seed % 4 != 3:
                x = sample(comm, (size,), torch.bfloat16, 50 + seed)
                assert same_bits(comm.all_reduce(x), rank_order_sum(comm, (size,), torch.bfloat16, 50 + seed))

    fused(3, "sentinel", body)


@pytest.mark.parametrize(("protocol", "dtype"), [("packets", "bf16"), ("sentinel", "f16"), ("sentinel", "bf16")])
def test_special_values_are_summed_as_ever(protocol, dtype):
    """Signed zeros, infinities, NaN, what is subnormal and what overflows: every pair, to the bit."""
    info = torch.finfo(DTYPES[dtype])
    sizes = [0.0, info.tiny, 3 * info.tiny * info.eps, 1.0, 1.0 + info.eps, 0.4999 * info.eps, info.max, float("inf")]
    values = torch.tensor([*sizes, *(-one for one in sizes), float("nan")], dtype=torch.float64).to(DTYPES[dtype])

    def body(kernel):
        n = len(values)
        ours = torch.zeros(2, 512, dtype=values.dtype), torch.zeros(2, 512, dtype=values.dtype)
        for row in range(2):
            ours[0][row, : n * n], ours[1][row, : n * n] = values.repeat_interleave(n), values.repeat(n)
        residual = torch.tensor([[-0.0], [1.0]], dtype=values.dtype).expand(2, 512).contiguous()
        device = kernel.comm.device
        weight = torch.ones(512, dtype=values.dtype, device=device)
        got = kernel(ours[kernel.comm.rank].to(device), residual.to(device), weight)[0].cpu()
        total = (0.0 + ours[0].float() + ours[1].float()).to(values.dtype)
        want = (total.float() + residual.float()).to(values.dtype)
        assert torch.equal(got.isnan(), want.isnan())
        known = ~want.isnan()
        assert same_bits(got[known], want[known])

    fused(2, protocol, body, Variant(512, exact=True, single=True), dtype)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_late_rank_is_waited_for(protocol):
    def body(kernel):
        for late in range(3):
            if kernel.comm.rank == late:
                time.sleep(0.05)
            kernel.check(late, 2, 1024)

    fused(3, protocol, body)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_epochs_wrap(protocol):
    def body(kernel):
        kernel.comm._session.channels.reset(epoch=0xFFFFFFF6)
        kernel.comm._session.world.barrier()
        for seed in range(12):
            kernel.check(seed, 1 + seed % 3, 512)
        kernel.comm.barrier()

    fused(2, protocol, body)


@pytest.mark.parametrize(("protocol", "single"), [*((one, False) for one in PROTOCOLS), ("packets", True)])
def test_a_rank_that_does_not_come_leaves_nan_and_a_record(protocol, single):
    def body(kernel):
        x, residual, weight = kernel.inputs(1, 2, 1024)
        if kernel.comm.rank == 1:
            return None
        residual_out, out, codes, scales = kernel.launch(x, residual, weight, torch.zeros(2, device=x.device))
        kernel.comm._session.synchronize()
        assert residual_out.isnan().all()
        assert out.isnan().all()
        assert scales.isnan().all()
        assert (codes == kernel.variant.fp8.nan).all()
        with pytest.raises(CommTimeout) as caught:
            kernel.comm.check()
        return caught.value.record.peer

    variant = Variant(HIDDEN, quantize="token", single=single)
    assert fused(2, protocol, body, variant, timeout=0.3) == [1, None]


@pytest.mark.host_only
@pytest.mark.parametrize("warp", [32, 64])
@pytest.mark.parametrize("quantize", ["token", "group"])
def test_warps_of_both_widths(warp, quantize, monkeypatch):
    monkeypatch.setenv("FLYCOMM_HOST_WARP", str(warp))
    variant = Variant(HIDDEN, quantize=quantize, floor=1e-5 + warp * 1e-9)  # another kernel for each
    fused(2, "packets", lambda kernel: kernel.check(1, 3, HIDDEN), variant, blocks=1, threads=128)


def test_what_cannot_be_built_is_refused():
    with pytest.raises(UsageError, match="a block of 96 threads"):
        reduce_norm.build("flags", Variant(HIDDEN))(2, "bf16", 1, 96)
    with pytest.raises(UsageError, match="quantize='row'"):
        reduce_norm.build("flags", Variant(HIDDEN, quantize="row"))(2, "bf16", 1, 64)


def test_bytes_of_a_slot():
    assert slot_bytes(1, 8192, "bf16", 48, 256) == 48 * 8192 * 2
    assert slot_bytes(49, 7168, "bf16", 48, 256) == 2 * 48 * 8192 * 2
    assert slot_bytes(3, 1000, "f32", 2, 64) == 2 * 2 * 1024 * 4
