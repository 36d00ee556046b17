# SPDX-License-Identifier: Apache-2.0
"""The mono layer behind attention: right against f64 up to the choice of experts, the same bits on all ranks."""

from __future__ import annotations

import time
from functools import cache

import pytest
import torch

from flycomm import targets
from flycomm.epoch import EPOCH_LAST
from flycomm.errors import CommTimeout, ResidencyError, UsageError
from flycomm.kernels.mono_attention_out import Layer, scratch_bytes, slot_bytes
from flycomm.mono import AttentionOutLayer
from tests.ranks import run, same_bits, settle, sharing

EPS = 1e-5
BLOCKS, THREADS = 2, 64
SMALL = {"hidden": 64, "inner": 32, "experts": 8, "top_k": 2}
NOAUX = {"scoring": "sigmoid", "bias": True}
TYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
LIMIT = 2**-6  # of the largest: bf16 for each partial sum, for their sum, for the rows that the router reads


def of(rows, protocol="packets", **changes):
    return Layer(**(SMALL | {"rows": rows, "protocol": protocol} | changes))


@cache
def everything(world, layer, rows, seed=0):
    """(x, residual, o_proj, norm_weight, router, bias) of every rank, on the CPU; x and o_proj differ."""
    generator = torch.Generator().manual_seed(100 * seed + rows)

    def made(*shape, scale=1.0, dtype=torch.bfloat16):
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    residual, weight = made(rows, layer.hidden), 1 + made(layer.hidden, scale=0.2)
    router = made(layer.experts, layer.hidden, scale=2 * layer.hidden**-0.5, dtype=TYPES[layer.router])
    bias = made(layer.experts, scale=0.3, dtype=torch.float32) if layer.bias else None
    return [
        (
            made(rows, layer.inner),
            residual,
            made(layer.hidden, layer.inner, scale=layer.inner**-0.5),
            weight,
            router,
            bias,
        )
        for _ in range(world)
    ]


def exact(layer, ranks):
    """In f64, nothing rounded: residual_out, normed, scores, and what decides."""
    _, residual, _, weight, router, bias = ranks[0]
    total = residual.double() + sum(x.double() @ o_proj.double().T for x, _, o_proj, *_ in ranks)
    normed = total / torch.sqrt((total * total).mean(-1, keepdim=True) + EPS) * weight.double()
    logits = normed @ router.double().T
    scores = logits.softmax(-1) if layer.scoring == "softmax" else logits.sigmoid()
    return total, normed, logits, scores, logits if bias is None else scores + bias.double()


def is_right(layer, results, world, seed=0):
    """What every rank got, against f64, and each other."""
    ranks = everything(world, layer, len(results[0][0]), seed)
    total, normed, logits, scores, deciding = exact(layer, ranks)
    residual_out, normed_out, ids, weights = results[0]
    assert (residual_out.double() - total).abs().max() <= LIMIT * total.abs().max()
    assert (normed_out.double() - normed).abs().max() <= LIMIT * normed.abs().max()

    slack = 2**-8 * logits.abs().max()
    decided = slack if layer.bias is False else slack / 2  # scores move by less than half of what logits do
    best, order = deciding.sort(dim=-1, descending=True, stable=True)
    chosen = ids.long()
    assert all(len(set(row)) == layer.top_k for row in ids.tolist())
    assert (deciding.gather(1, chosen) - best[:, : layer.top_k]).abs().max() <= decided
    apart = best[:, :-1] - best[:, 1:] > 2 * decided
    ends = torch.ones(len(ids), 1, dtype=torch.bool)
    clear = (torch.cat([ends, apart], 1) & torch.cat([apart, ends], 1))[:, : layer.top_k]
    assert torch.equal(chosen[clear], order[:, : layer.top_k][clear])

    want = scores.gather(1, chosen)
    if layer.renormalize:
        want = want / want.sum(-1, keepdim=True)
    assert (weights.double() - want).abs().max() <= 2 * slack * want.max()
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True)), "the same on all ranks"
    return clear.float().mean().item()


def call(layer, comm, rows, seed=0):
    inputs = everything(comm.world_size, layer.layer, rows, seed)[comm.rank]
    result = layer(*(one if one is None else one.to(comm.device) for one in inputs), EPS)
    comm.check()
    return tuple(one.cpu() for one in result)


def mono(world, layer, body, blocks=BLOCKS, threads=THREADS, **options):
    """``body(layer, comm)`` on every rank; the results in rank order."""

    def rank(comm):
        return body(AttentionOutLayer(comm, "out", layer, threads), comm)

    return run(world, rank, kernel_channels={"out": (blocks, slot_bytes(layer))}, **options)


LONG = of(1, hidden=1024, experts=64, top_k=6)
MANY = 16  # blocks: more than cores, so that some come late

CASES = [
    (1, 1, LONG),
    (1, 3, of(4, "flags", **NOAUX)),
    (2, 1, of(1, hidden=256, inner=128, experts=40, top_k=8, **NOAUX)),
    (2, 2, of(2, "flags", router="f32", renormalize=False)),
    (3, 5, of(8, router="f32", scoring="sigmoid")),
    (3, 2, of(2, "flags", experts=33, top_k=3, bias=True)),
    (4, 1, of(1, top_k=1, scoring="sigmoid", renormalize=False)),
    (2, 41, of(48, "flags", hidden=96, inner=24, experts=20, router="f32")),  # its router by dot products, in parts
    (1, 20, of(32, hidden=96, experts=40, math="matrix", **NOAUX)),
]


@pytest.mark.parametrize(("world", "rows", "layer"), CASES)
def test_against_f64_and_again_and_again(world, rows, layer):
    def body(one, comm):
        first = [call(one, comm, rows, seed) for seed in range(3)]  # what is read too early is another call's
        for seed in range(3):
            assert all(same_bits(a, b) for a, b in zip(call(one, comm, rows, seed), first[seed], strict=True))
        return first

    results = mono(world, layer, body, MANY if world == 1 else BLOCKS)
    clear = [is_right(layer, [one[seed] for one in results], world, seed) for seed in range(3)]
    assert max(clear) > 0, "some choices are clear beyond what rounding does"


def test_sixteen_rows():
    layer = of(16, inner=16, **NOAUX)
    results = mono(2, layer, lambda one, comm: call(one, comm, 16), threads=256)
    is_right(layer, results, 2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("held", "layer"),
    [
        (1, of(1, hidden=1536, experts=32, top_k=1, router="f32")),
        (3, of(4, "flags", hidden=1536, experts=160, top_k=6, **NOAUX)),
        (1, of(1, hidden=1536, experts=256, top_k=8, **NOAUX)),
        (4, of(4, "flags", hidden=1536, experts=256, top_k=8, router="f32", renormalize=False)),
        (7, of(8, hidden=1536, experts=384, top_k=8, **NOAUX)),
        (16, of(16, "flags", hidden=768, experts=128, top_k=8)),
        (11, of(16, hidden=768, experts=512, top_k=16, router="f32", bias=True)),
        (30, of(32, "flags", hidden=1536, experts=256, top_k=8, **NOAUX)),
    ],
)
def test_experts_of_real_models(held, layer):
    is_right(layer, mono(2, layer, lambda one, comm: call(one, comm, held), 4, 256), 2)


@pytest.mark.parametrize("protocol", ["packets", pytest.param("flags", marks=pytest.mark.full)])
def test_rows_come_and_go_launch_after_launch(protocol):
    """No reset between launches: epochs and marks go on, slots rest and come back."""
    layer, order = of(4, protocol, **NOAUX), [(seed, 1 + seed * 5 % 4) for seed in range(16)]
    results = mono(2, layer, lambda one, comm: [call(one, comm, rows, seed) for seed, rows in order])
    for i, (seed, _) in enumerate(order):
        is_right(layer, [one[i] for one in results], 2, seed)


def test_epochs_wrap():
    layer = of(2, "flags", **NOAUX)

    def body(one, comm):
        start = EPOCH_LAST - 3
        comm._session.channels.reset(epoch=start)
        one.scratch[: 4 * 2 * BLOCKS].view(torch.int32).fill_(start - (1 << 32))
        settle()
        comm._session.world.barrier()  # of the host: a peer that is early would signal into pads that are yet reset
        return [call(one, comm, 2, seed) for seed in range(8)]

    results = mono(2, layer, body)
    for seed in range(8):
        is_right(layer, [one[seed] for one in results], 2, seed)


@pytest.mark.parametrize(
    ("math", "warp", "blocks", "threads", "rows"),
    [
        ("dot", 64, 1, 128, 2),
        ("matrix", 64, 1, 512, 8),
        pytest.param("dot", 32, 5, 64, 4, marks=pytest.mark.full),
        pytest.param("dot", 64, 2, 64, 1, marks=pytest.mark.full),
        pytest.param("matrix", 32, 5, 64, 48, marks=pytest.mark.full),
    ],
)
def test_bits_do_not_depend_on_grid_warp_or_batch(monkeypatch, math, warp, blocks, threads, rows):
    changes = {"experts": 36, "math": math} | NOAUX
    inputs = everything(2, of(1, **changes), 1)

    def body(one, comm):
        result = one(*(tensor.to(comm.device) for tensor in inputs[comm.rank]), EPS)
        comm.check()
        return [tensor.cpu() for tensor in result]

    plain = mono(2, of(1, **changes), body)
    if targets.active().name == "host":
        monkeypatch.setenv("FLYCOMM_HOST_WARP", str(warp))
    other = mono(2, of(rows, "flags", **changes), body, blocks, threads)
    assert all(same_bits(a, b) for one, two in zip(plain, other, strict=True) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(
    ("scoring", "bias", "math"), [("softmax", False, "dot"), ("sigmoid", True, "dot"), ("sigmoid", True, "matrix")]
)
def test_experts_that_tie_come_by_their_number(scoring, bias, math):
    """Whole numbers, so that equal logits are equal to the bit, whoever's router rows they are."""
    layer = of(2, experts=40, top_k=8, scoring=scoring, bias=bias, math=math)
    generator = torch.Generator().manual_seed(3)

    def whole(*shape, most=3):
        return torch.randint(-most, most + 1, shape, generator=generator).bfloat16()

    levels = whole(5, layer.hidden, most=1)  # five different experts, eight times
    router = levels[torch.randperm(40, generator=generator) % 5]
    x, residual, o_proj = whole(2, layer.inner), whole(2, layer.hidden), whole(layer.hidden, layer.inner, most=1)
    weight = torch.ones(layer.hidden).bfloat16()
    steps = torch.arange(40) % 2 * 4.0 if bias else None  # in f32 a sum of a step and a score is exact enough to tie

    def body(one, comm):
        inputs = (x, residual, o_proj, weight, router, steps)
        result = one(*(tensor if tensor is None else tensor.to(comm.device) for tensor in inputs), EPS)
        comm.check()
        return [tensor.cpu() for tensor in result]

    results = mono(2, layer, body)
    ranks = [(x, residual, o_proj, weight, router, steps)] * 2
    *_, deciding = exact(layer, ranks)
    _, order = deciding.sort(dim=-1, descending=True, stable=True)
    for _, _, ids, weights in results:
        assert torch.equal(ids.long(), order[:, :8])
        ties = deciding.gather(1, ids.long()).diff(dim=1) == 0
        assert ties.sum() > 8
        assert (weights.diff(dim=1)[ties] == 0).all()


def test_a_nan_in_a_row_is_its_own_affair():
    layer = of(2, "flags", **NOAUX)

    def body(one, comm):
        inputs = [tensor.to(comm.device) for tensor in everything(2, layer, 2)[comm.rank]]
        right = one(*inputs, EPS)
        inputs[1] = inputs[1].clone()
        inputs[1][1, 7] = float("nan")
        broken = one(*inputs, EPS)
        comm.check()
        assert (broken.topk_ids[1] == -1).all()
        assert broken.topk_weights[1].isnan().all()
        assert broken.normed[1].isnan().all()
        for a, b in zip(right, broken, strict=True):
            assert same_bits(a[0].cpu(), b[0].cpu())

    mono(2, layer, body)


def test_a_late_rank_is_waited_for():
    layer = of(1)

    def body(one, comm):
        results = []
        for seed in range(4):
            if comm.rank == seed % 2:
                time.sleep(0.1)
            results.append(call(one, comm, 1, seed))
        return results

    results = mono(2, layer, body)
    for seed in range(4):
        is_right(layer, [one[seed] for one in results], 2, seed)


@pytest.mark.parametrize(("protocol", "math"), [("packets", "matrix"), ("flags", "dot")])
def test_a_rank_that_does_not_come_is_an_error_and_no_choice(protocol, math):
    layer = of(1, protocol, math=math)

    def body(one, comm):
        call(one, comm, 1)
        if comm.rank == 1:
            return
        inputs = everything(2, layer, 1)[0][:5]
        result = one(*(tensor.to(comm.device) for tensor in inputs), eps=EPS)
        settle()
        with pytest.raises(CommTimeout):
            comm.check()
        assert result.residual_out.isnan().all()
        assert result.normed.isnan().all()
        assert (result.topk_ids == -1).all()
        assert result.topk_weights.isnan().all()

    mono(2, layer, body, timeout=0.3)


def test_what_a_failed_wait_leaves_is_right_or_no_choice():
    """A limit so short that blocks of one device often give up on each other."""
    layer = LONG

    def body(one, comm):
        for seed in range(40):
            inputs = everything(1, layer, 1, seed % 7)
            residual_out, normed, ids, weights = one(*(tensor.to(comm.device) for tensor in inputs[0][:5]), eps=EPS)
            settle()
            try:
                comm.check()
            except CommTimeout:
                comm.recover()
            total, exact_normed, *_ = exact(layer, inputs)
            for got, want in ((residual_out, total), (normed, exact_normed)):
                wrong = (got.cpu().double() - want).abs() > LIMIT * want.abs().max()  # false for NaN
                assert not wrong.any(), seed
            if (ids.cpu() == -1).all():
                assert weights.isnan().all()
            else:
                is_right(layer, [(total, exact_normed, ids.cpu(), weights.cpu())], 1, seed % 7)

    mono(1, layer, body, MANY, timeout=1e-9)


def test_after_a_failure_ranks_recover():
    layer = of(1)

    def body(one, comm):
        call(one, comm, 1)
        if comm.rank == 0:
            inputs = everything(2, layer, 1)[0][:5]
            one(*(tensor.to(comm.device) for tensor in inputs), eps=EPS)
            settle()
            with pytest.raises(CommTimeout):
                comm.check()
        comm.recover()
        return call(one, comm, 1, 1)

    is_right(layer, mono(2, layer, body, timeout=0.3), 2, 1)


def test_a_grid_over_residency_is_refused(monkeypatch):
    import flycomm.mono._layer as module

    ranks = sharing(2)
    held = 2 * ranks - 1
    monkeypatch.setattr(module, "resident_blocks", lambda kernel, target, device: held)
    says = rf"{ranks} rank\(s\) .* grid of 2 blocks .* over the {held} .* at most 1 blocks"

    def body(comm):
        with pytest.raises(ResidencyError, match=says):
            AttentionOutLayer(comm, "out", of(1), THREADS)

    run(2, body, kernel_channels={"out": (BLOCKS, slot_bytes(of(1)))})


def test_what_does_not_fit_is_refused():
    def body(one, comm):
        x, residual, o_proj, weight, router, _ = (
            tensor if tensor is None else tensor.to(comm.device) for tensor in everything(1, of(1), 1)[0]
        )
        with pytest.raises(UsageError, match=r"router is .* torch.float32"):
            one(x, residual, o_proj, weight, router.float())
        with pytest.raises(UsageError, match="bias is given where the layer has bias=False"):
            one(x, residual, o_proj, weight, router, torch.zeros(8, device=comm.device))
        with pytest.raises(UsageError, match=r"2 rows are not in 1..1"):
            one(x.repeat(2, 1), residual, o_proj, weight, router)

    mono(1, of(1), body)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden": 72}, "hidden 72"),
        ({"inner": 12}, "inner 12"),
        ({"top_k": 9}, "the best 9 of 8 experts"),
        ({"top_k": 0}, "the best 0"),
        ({"experts": 1024, "top_k": 17}, "the best 17 of 1024"),
        ({"experts": 513}, "of 513 experts"),
        ({"router": "f16"}, "a router of 'f16'"),
        ({"scoring": "tanh"}, "by 'tanh'"),
        ({"rows": 3}, "3 rows"),
        ({"rows": 48, "math": "dot"}, "48 rows with math='dot'"),
    ],
)
def test_layers_that_there_are_not(changes, problem):
    with pytest.raises(UsageError, match=problem):
        Layer(**(SMALL | {"rows": 1} | changes)).check("bf16", 64)


def test_bytes():
    layer = Layer(6144, 1024, 256, 8, 4)
    assert slot_bytes(layer) == 4 * 6144 * 4
    assert scratch_bytes(layer, 128) == 1024 + 4 * 768 * 4 + 4 * 6144 * 2 + 4 * 256 * 16
