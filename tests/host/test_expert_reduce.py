# SPDX-License-Identifier: Apache-2.0
"""Experts' weighted sum + all-reduce + residual + RMSNorm: the bits of the sum alone and the fused norm of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import flycomm.ops  # noqa: F401  (registers the ops)
from flycomm.errors import CommTimeout, UsageError
from flycomm.kernels import Specialization, compiled, reduce_norm
from flycomm.kernels.reduce_norm import Variant, slot_bytes
from flycomm.primitives.experts import Experts
from tests.host.expert_reference import Case, added, weighted_sum
from tests.host.norm_reference import quantize, rms_norm, rms_norm_exact
from tests.ranks import DTYPES, run, same_bits, sample

EPS = 1e-5
ENOUGH = {"max_bytes": 48 << 20}
TOPK = 3


class Call:
    """One call's inputs: all ranks' on the CPU, this one's on the device."""

    def __init__(self, comm, case, rows, hidden, seed=0, lead=None):
        self.comm, self.case = comm, case
        self.every = [case.inputs(rank, comm.world_size, rows, hidden, seed) for rank in range(comm.world_size)]
        lead = lead or (rows,)
        shapes = {"expert_out": (*lead, case.topk, hidden), "shared": (*lead, hidden)}
        self.mine = {}
        for name, one in self.every[comm.rank].items():
            shape = shapes.get(name, (*lead, case.topk))
            if name == "expert_out" and case.layout != "dense":
                shape = one.shape
            self.mine[name] = None if one is None else one.reshape(shape).to(comm.device)
        self.residual = sample(comm, (*lead, hidden), DTYPES[case.dtype], 100 + seed, rank=0)
        self.weight = sample(comm, (hidden,), DTYPES[case.dtype], 200 + seed, rank=0)

    def __call__(self, gemma=False, eps=EPS):
        out, weights, index, shared = self.mine.values()
        call = self.comm.moe_finalize_all_reduce_rms_norm
        return call(out, weights, self.residual, self.weight, eps, gemma, index=index, shared=shared)

    def quantized(self, how, scale=None):
        out, weights, index, shared = self.mine.values()
        call = self.comm.moe_finalize_all_reduce_rms_norm_quant
        return call(out, weights, self.residual, self.weight, how, scale, EPS, index=index, shared=shared)

    def own(self):
        """This rank's part of the sum, rounded."""
        total = torch.from_numpy(weighted_sum(self.every[self.comm.rank])).to(self.residual.dtype)
        return total.view(self.residual.shape).to(self.comm.device)

    def added(self):
        """What is to be normed, (rows, hidden) f32 on the CPU."""
        return added(self.every, self.residual.cpu().flatten(0, -2))

    def normed(self, gemma=False):
        per_fragment = 16 // self.residual.element_size()
        return rms_norm(self.added(), self.weight.cpu(), EPS, per_fragment, gemma).to(self.residual.dtype)

    def check(self, gemma=False):
        """The kernel's results: to the bit those of NumPy, and of the fused norm of the sum that NumPy made."""
        rows, hidden = self.residual.shape
        assert self.comm.plan_rms_norm(self.residual.dtype, rows, hidden).row is not None
        normed, residual_out = self(gemma)
        assert same_bits(residual_out.cpu(), self.added().to(self.residual.dtype))
        assert same_bits(normed.cpu(), self.normed(gemma))
        again = self.comm.all_reduce_rms_norm(self.own(), self.residual, self.weight, EPS, gemma)
        assert same_bits(again[0], normed)
        assert same_bits(again[1], residual_out)


@pytest.mark.parametrize(
    ("world", "protocol", "hidden", "case"),
    [
        (1, "flags", 136, Case("dense", "bf16", 8, "f32")),
        (2, "packets", 520, Case("permuted", "f16", 2, "", shared=True)),
        (3, "sentinel", 260, Case("permuted", "f32", TOPK)),
        (4, "flags", 64, Case("elsewhere", "bf16", 1, "f32", shared=True)),
        (5, "packets", 64, Case("dense", "f32", 2, "", shared=True)),
        (6, "sentinel", 136, Case("dense", "bf16", TOPK, "")),
        (7, "flags", 64, Case("permuted", "bf16", 16, "f32", shared=True)),
        (8, "packets", 64, Case("elsewhere", "bf16", 2, "")),
        (2, "sentinel", 136, Case("permuted", "bf16", 8, "f32")),
    ],
    ids=str,
)
def test_it_is_the_sum_and_its_fused_norm_to_the_bit(world, protocol, hidden, case):
    """Rows fewer and more than blocks: some are held from the post to the end, some summed again."""

    def body(comm):
        for seed, rows in enumerate((1, 5, 2)):
            Call(comm, case, rows, hidden, seed).check(gemma=world % 2 == 0)

    run(world, body, protocol=protocol, **ENOUGH)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["dense", "permuted", "elsewhere"])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(("topk", "weight"), [(1, "f32"), (5, ""), (16, "f32")])
@pytest.mark.parametrize(("world", "protocol"), [(2, "packets"), (3, "sentinel"), (8, "flags")])
def test_every_layout_type_and_number_of_experts(layout, dtype, topk, weight, world, protocol):
    case = Case(layout, dtype, topk, weight, shared=topk == 5)

    def body(comm):
        for seed, (rows, hidden) in enumerate(((1, 7168), (48, 512), (17, 1544))):
            Call(comm, case, rows, hidden, seed).check(gemma=topk == 1)

    run(world, body, protocol=protocol, **ENOUGH)


@pytest.mark.parametrize("layout", ["dense", "permuted"])
def test_it_is_near_the_exact_sum(layout):
    """Against f64: a rounding for each rank, one for their sum, one of the output, and f32's for every expert."""

    def body(comm):
        call = Call(comm, Case(layout, "bf16", 8, "f32", shared=True), 3, 256)
        _, residual_out = call()
        residual = call.residual.cpu().double()
        parts = [weighted_sum(inputs, np.float64) for inputs in call.every]
        total = torch.from_numpy(sum(parts[1:], parts[0]))
        absolute = {name: None if one is None else one.abs() for name, one in call.every[0].items()}
        sizes = sum(np.abs(part) for part in parts) + weighted_sum(
            absolute | {"index": call.every[0]["index"]}, np.float64
        )
        bound = torch.from_numpy(sizes) * 2**-7 + (total + residual).abs() * 2**-8
        assert ((residual_out.cpu().double() - total - residual).abs() <= bound).all()
        assert (bound < 0.25 * (total + residual).abs().mean()).all(), "a bound that bounds"

    run(3, body, **ENOUGH)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("layout", ["dense", "permuted", "elsewhere"])
def test_separate_kernels_have_the_same_contract(fused, layout):
    hidden = 128 if fused else 132

    def body(comm):
        call = Call(comm, Case(layout, "bf16", TOPK, "f32", shared=True), 6, hidden, lead=(2, 3))
        assert (comm.plan_rms_norm(torch.bfloat16, 6, hidden).row is not None) == fused
        normed, residual_out = call()
        assert normed.shape == residual_out.shape == (2, 3, hidden)
        assert same_bits(residual_out.cpu().view(-1, hidden), call.added().to(torch.bfloat16))
        exact = rms_norm_exact(call.added(), call.weight.cpu(), EPS)
        assert torch.allclose(normed.cpu().view(-1, hidden).double(), exact, rtol=2**-8, atol=1e-6)

    run(2, body, **ENOUGH)


@pytest.mark.parametrize("how", ["static", "token", "group"])
@pytest.mark.parametrize("fused", [True, False])
def test_eight_bits(how, fused):
    def body(comm):
        call = Call(comm, Case("permuted", "bf16", 2, "f32"), 3, 256 if fused else 260)
        scale = torch.full((1,), 0.03, device=comm.device) if how == "static" else None
        codes, scales, residual_out = call.quantized(how, scale)
        normed, plain = call()
        assert same_bits(residual_out, plain)
        wanted, divisors = quantize(normed.cpu().float(), how, comm._fused._fp8, Variant.floor, 0.03)
        assert torch.equal(scales.cpu().flatten(), divisors.flatten())
        assert torch.equal(codes.cpu().view(torch.uint8), wanted.view(torch.uint8))

    run(2, body, **ENOUGH)


@pytest.mark.parametrize("fused", [True, False])
def test_what_is_not_here_is_not_looked_at(fused):
    """Absent experts add nothing, whatever their weights are; present ones count even with a weight of 0."""
    hidden = 64 if fused else 68

    def body(comm):
        call = Call(comm, Case("permuted", "f32", 2, "f32", shared=True), 4, hidden)
        inputs, residual = call.mine, call.residual
        inputs["index"].copy_(torch.tensor([[-1, 0], [-1, -1], [1, -7], [2, 2]], dtype=torch.int32))
        inputs["expert_out"] = sample(comm, (3, hidden), torch.float32, 7)
        nan, inf = float("nan"), float("inf")
        inputs["topk_weights"].copy_(torch.tensor([[nan, 1.0], [inf, nan], [-0.0, nan], [0.0, 2.0]]))
        inputs["expert_out"][2, 3] = inf
        inputs["expert_out"][1] = 1.0
        residual[1, 0] = inf
        _, added = call()
        every = [sample(comm, (3, hidden), torch.float32, 7, rank).cpu() for rank in range(2)]
        shared = [one["shared"] for one in call.every]
        want = [every[r][0] + shared[r][0] for r in range(2)]
        assert same_bits(added[0].cpu(), want[0] + want[1] + residual[0].cpu())
        assert same_bits(added[1].cpu(), shared[0][1] + shared[1][1] + residual[1].cpu())
        assert same_bits(added[2].cpu(), shared[0][2] + shared[1][2] + residual[2].cpu()), "-0 is lost in +0"
        assert added[3].isnan().nonzero().tolist() == [[3]], "0 times infinity"

    run(2, body, **ENOUGH)


def test_ranks_may_have_other_layouts_and_numbers_of_experts():
    def body(comm):
        case = (Case("dense", topk=2), Case("permuted", topk=TOPK, weight="f32", shared=True), Case("elsewhere"))[
            comm.rank
        ]
        call = Call(comm, case, 5, 64)
        wanted = comm.all_reduce_rms_norm(call.own(), call.residual, call.weight, EPS)
        assert all(same_bits(left, right) for left, right in zip(call(), wanted, strict=True))
        return wanted[1].cpu()

    results = run(3, body, debug=True, **ENOUGH)
    assert all(same_bits(one, results[0]) for one in results)


def test_strided_and_misaligned_inputs_and_other_calls_in_between():
    def body(comm):
        call = Call(comm, Case("permuted", "bf16", TOPK, "f32", shared=True), 5, 64)
        want = call()
        plain = {name: one.clone() for name, one in call.mine.items()}
        for _ in range(2):
            comm.all_reduce_rms_norm(call.own(), call.residual, call.weight)
            for name, one in plain.items():
                if name in ("topk_weights", "index"):
                    call.mine[name] = one.t().contiguous().t()
                else:
                    call.mine[name] = torch.cat([one.flatten()[:1], one.flatten()])[1:].view(one.shape)
            assert all(same_bits(left, right) for left, right in zip(call(), want, strict=True))

    run(2, body, **ENOUGH)


def test_the_ops_and_their_fakes():
    def body(comm):
        call = Call(comm, Case("permuted", "f16", 2, "", shared=True), 2, 64)
        out, weights, index, shared = call.mine.values()
        given = (out, weights, call.residual, call.weight, index, shared)
        ops = torch.ops.flycomm
        got = ops.moe_finalize_all_reduce_rms_norm(*given, EPS, True, comm.group_name)
        assert all(same_bits(left, right) for left, right in zip(got, call(True), strict=True))
        got = ops.moe_finalize_all_reduce_rms_norm_quant(*given, "token", None, EPS, False, comm.group_name)
        want = call.quantized("token")
        assert all(
            torch.equal(left.view(torch.uint8), right.view(torch.uint8)) for left, right in zip(got, want, strict=True)
        )
        return None

    run(2, body, **ENOUGH)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        out, weights, row = torch.empty(3, 2, 8), torch.empty(3, 2), torch.empty(3, 8)
        op = torch.ops.flycomm.moe_finalize_all_reduce_rms_norm
        normed, residual_out = op(out, weights, row, torch.empty(8), None, None, EPS, False, "nobody")
        assert normed.shape == residual_out.shape == row.shape


@pytest.mark.host_only
@pytest.mark.parametrize(("warp", "topk"), [(32, 4), (64, 5)])  # another kernel for each
def test_warps_of_both_widths(warp, topk, monkeypatch):
    monkeypatch.setenv("FLYCOMM_HOST_WARP", str(warp))
    run(2, lambda comm: Call(comm, Case("permuted", "bf16", topk, "f32"), 3, 520).check(), **ENOUGH)


def test_a_rank_that_does_not_come_leaves_nan():
    def body(comm):
        call = Call(comm, Case("dense", "bf16", 2, "f32"), 3, 64)
        call()  # loads the kernel: ranks of one process do that together
        if comm.rank == 1:
            return None
        normed, residual_out = call()
        comm._session.synchronize()
        assert normed.isnan().all()
        assert residual_out.isnan().all()
        with pytest.raises(CommTimeout) as caught:
            comm.check()
        return caught.value.record.peer

    assert run(2, body, timeout=0.3, **ENOUGH) == [1, None]


def test_an_output_may_be_the_residual():
    """Its row stands in for absent experts, so it is read before it is written, whenever a row is summed."""
    blocks, threads, rows, hidden = 2, 64, 5, 512
    case = Case("permuted", "bf16", 2, "f32")
    variant = Variant(hidden, experts=Experts(2, "f32", permuted=True))

    def body(comm):
        kernel = compiled(
            Specialization("experts", reduce_norm.build("flags", variant), comm.world_size, "bf16", blocks, threads)
        )
        call = Call(comm, case, rows, hidden)
        want, want_residual = call.normed(), call.added().to(torch.bfloat16)
        out, weights, index, _ = call.mine.values()
        for place in (0, 1):
            residual, other = call.residual.clone(), torch.empty_like(call.residual)
            outputs = (residual, other) if place == 0 else (other, residual)
            tensors = (out, residual, call.weight, *outputs)
            addresses = [one.data_ptr() for one in tensors]
            factors = weights.data_ptr(), index.data_ptr(), 0
            kernel(comm.peers("rows"), 1, *addresses, 0, 0, *factors, rows, hidden, EPS, comm.stream())
            comm.check()
            assert same_bits(outputs[0].cpu(), want_residual)
            assert same_bits(outputs[1].cpu(), want)

    run(2, body, kernel_channels={"rows": (blocks, slot_bytes(rows, hidden, "bf16", blocks, threads))})


def test_bad_input_is_one_sentence():
    def body(comm):
        call = Call(comm, Case("permuted", "bf16", 2, "f32"), 3, 64)
        out, weights, index, _ = call.mine.values()
        dense = out.new_zeros(3, 2, 64)
        residual, weight = call.residual, call.weight
        many = out.new_zeros(3, 17, 64), weights.new_zeros(3, 17)

        def given(out=out, weights=weights, index=index, shared=None, **options):
            comm.moe_finalize_all_reduce_rms_norm(out, weights, residual, weight, index=index, shared=shared, **options)

        for options, words in (
            ({"weights": weights[:2]}, r"topk_weights is \(2, 2\) torch.float32; pass \(3, 'topk'\)"),
            ({"weights": weights.double()}, "of the residual's type or float32"),
            ({"out": many[0], "weights": many[1], "index": None}, r"17 experts a row, not 1..16"),
            ({"out": dense}, r"expert_out is \(3, 2, 64\) torch.bfloat16; pass \('rows', 64\)"),
            ({"index": None}, r"pass \(3, 2, 64\) of the residual's type, torch.bfloat16, or an index with rows"),
            ({"out": out.float()}, "of the residual's type"),
            ({"index": index.long()}, r"index is \(3, 2\) torch.int64; pass int32 of topk_weights' shape, \(3, 2\)"),
            ({"shared": residual[:1]}, r"shared is \(1, 64\) torch.bfloat16; pass a tensor that is like the residual"),
        ):
            with pytest.raises(UsageError, match=words):
                given(**options)
        with pytest.raises(UsageError, match="residual has no dimensions"):
            comm.moe_finalize_all_reduce_rms_norm(out, weights, residual[0, 0], weight, index=index)
        with pytest.raises(UsageError, match="call the op without _quant"):
            call.quantized("none")

    run(2, body, **ENOUGH)


@pytest.mark.parametrize(("experts", "words"), [(Experts(0), "topk=0 is not in 1..16"), (Experts(2, "f16"), "'f32'")])
def test_what_cannot_be_built_is_refused(experts, words):
    with pytest.raises(UsageError, match=words):
        reduce_norm.build("flags", Variant(64, experts=experts))(2, "bf16", 1, 64)
