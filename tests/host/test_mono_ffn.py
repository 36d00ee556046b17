# SPDX-License-Identifier: Apache-2.0
"""The mono feed-forward layer: right against f64, the same bits on all ranks, every time, whatever the grid."""

from __future__ import annotations

import time
from functools import cache

import pytest
import torch

from flycomm import targets
from flycomm.epoch import EPOCH_LAST
from flycomm.errors import CommTimeout, ResidencyError, UsageError
from flycomm.kernels.mono_ffn import Layer, scratch_bytes, slot_bytes
from flycomm.mono import FfnLayer
from flycomm.primitives.block_product import window_of
from tests.ranks import run, same_bits, settle, sharing

HIDDEN, INTER, OUT = 256, 128, 96
BLOCKS, THREADS = 2, 128
EPS = 1e-5
SMALL = (64, 32, 16)


@cache
def everything(world, rows, seed=0, hidden=HIDDEN, inter=INTER, out=OUT):
    """(x, residual, gate_up, down, norm_weight, projection) of every rank, on the CPU; shared ones are the same."""
    generator = torch.Generator().manual_seed(100 * seed + rows)

    def made(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    x, residual, weight = made(rows, hidden), made(rows, hidden), made(hidden)
    return [
        (
            x,
            residual,
            made(2 * inter, hidden, scale=hidden**-0.5),
            made(hidden, inter, scale=inter**-0.5),
            weight,
            made(out, hidden, scale=hidden**-0.5),
        )
        for _ in range(world)
    ]


def exact(ranks, rank):
    """In f64, nothing rounded: ``(out, residual_out)`` of a rank."""
    total = ranks[0][1].double()
    for x, _, gate_up, down, _, _ in ranks:
        gate, up = (x.double() @ gate_up.double().T).chunk(2, dim=1)
        total = total + (torch.nn.functional.silu(gate) * up) @ down.double().T
    normed = total / torch.sqrt((total * total).mean(-1, keepdim=True) + EPS) * ranks[0][4].double()
    return normed @ ranks[rank][5].double().T, total


def mono(
    world,
    rows,
    body,
    protocol="packets",
    blocks=BLOCKS,
    threads=THREADS,
    shape=(HIDDEN, INTER, OUT),
    math="auto",
    **options,
):
    """``body(layer, comm)`` on every rank; the results in rank order."""
    layer = Layer(*shape, rows, protocol, math)

    def rank(comm):
        return body(FfnLayer(comm, "ffn", layer, threads), comm)

    return run(world, rank, kernel_channels={"ffn": (blocks, slot_bytes(layer))}, **options)


def call(layer, comm, rows, seed=0, shape=(HIDDEN, INTER, OUT)):
    inputs = [one.to(comm.device) for one in everything(comm.world_size, rows, seed, *shape)[comm.rank]]
    out, residual_out = layer(*inputs, EPS)
    comm.check()
    return out.cpu(), residual_out.cpu()


def is_right(results, world, rows, seed=0, shape=(HIDDEN, INTER, OUT)):
    ranks = everything(world, rows, seed, *shape)
    for rank, (out, residual_out) in enumerate(results):
        want, total = exact(ranks, rank)
        # bf16 three times on the way to r (act, each partial, their sum), once more on the way to out
        assert (residual_out.double() - total).abs().max() <= 2**-6 * total.abs().max()
        assert (out.double() - want).abs().max() <= 2**-6 * want.abs().max()
        assert (out.double() - want).norm() <= 2**-7 * want.norm()
        assert same_bits(residual_out, results[0][1]), "all ranks hold the same rows"


@pytest.mark.parametrize(
    ("world", "rows", "held", "protocol"),
    [
        (1, 1, 1, "packets"),
        (1, 4, 3, "flags"),
        (2, 1, 1, "packets"),
        (2, 2, 2, "flags"),
        (3, 8, 5, "packets"),
        (3, 2, 2, "flags"),
        (4, 1, 1, "packets"),
    ],
)
def test_against_f64_and_again_and_again(world, rows, held, protocol):
    def body(layer, comm):
        first = call(layer, comm, held)
        for _ in range(5):
            assert all(same_bits(a, b) for a, b in zip(call(layer, comm, held), first, strict=True))
        return first

    is_right(mono(world, rows, body, protocol), world, held)


@pytest.mark.parametrize(
    ("rows", "held", "shape", "math", "blocks", "threads"),
    [
        (16, 16, SMALL, "auto", 2, 256),
        (16, 11, SMALL, "dot", 2, 256),
        (32, 19, (72, 24, 10), "auto", 3, 64),  # nothing is a whole number of units, or of segments
        (48, 48, SMALL, "auto", 1, 512),
        (1, 1, (2080, 16, 6), "matrix", 2, 128),  # slices of more than one window, the last one short
        pytest.param(8, 7, (6144, 32, 16), "auto", 4, 256, marks=pytest.mark.full),
        pytest.param(48, 35, (1024, 768, 136), "auto", 5, 256, marks=pytest.mark.full),
    ],
)
def test_many_rows_and_either_way_to_multiply(rows, held, shape, math, blocks, threads):
    def body(layer, comm):
        first = call(layer, comm, held, shape=shape)
        assert all(same_bits(a, b) for a, b in zip(call(layer, comm, held, shape=shape), first, strict=True))
        return first

    is_right(mono(2, rows, body, "flags", blocks, threads, shape, math), 2, held, shape=shape)


@pytest.mark.parametrize("shape", [(2568, 16, 6), (64, 840, 4), (320, 264, 2)])
def test_rows_longer_than_what_a_lane_loads_ahead(shape):
    """And lengths that are not a whole number of steps, tiles that are not one of turns."""

    def body(layer, comm):
        return call(layer, comm, 1, shape=shape)

    is_right(mono(2, 1, body, shape=shape, threads=256), 2, 1, shape=shape)


@pytest.mark.parametrize("protocol", ["packets", "flags"])
def test_rows_come_and_go_launch_after_launch(protocol):
    """No reset between launches: epochs and marks go on, slots rest and come back."""
    order = [(seed, 1 + seed * 5 % 4) for seed in range(24)]

    def body(layer, comm):
        return [call(layer, comm, rows, seed, SMALL) for seed, rows in order]

    results = mono(2, 4, body, protocol, shape=SMALL, threads=64)
    for i, (seed, rows) in enumerate(order):
        is_right([one[i] for one in results], 2, rows, seed, SMALL)


def test_epochs_wrap():
    def body(layer, comm):
        start = EPOCH_LAST - 3
        comm._session.channels.reset(epoch=start)
        layer.scratch[: 4 * 2 * BLOCKS].view(torch.int32).fill_(start - (1 << 32))
        settle()
        comm._session.world.barrier()  # of the host: a peer that is early would signal into pads that are yet reset
        return [call(layer, comm, 2, seed, SMALL) for seed in range(8)]

    results = mono(2, 2, body, "flags", shape=SMALL, threads=64)
    for seed in range(8):
        is_right([one[seed] for one in results], 2, 2, seed, SMALL)


def test_a_layer_that_is_made_when_its_channel_has_long_been_used():
    """Its marks are 0, as ``reset`` leaves them: of no call, neither before the channel's epoch nor after it."""

    def body(layer, comm):
        comm._session.channels.reset(epoch=(1 << 31) + 20)
        layer.reset()
        settle()
        comm._session.world.barrier()
        return [call(layer, comm, 2, seed, SMALL) for seed in range(2)]

    results = mono(2, 2, body, "flags", shape=SMALL, threads=64)
    for seed in range(2):
        is_right([one[seed] for one in results], 2, 2, seed, SMALL)


@pytest.mark.parametrize(
    ("math", "warp", "blocks", "threads", "rows"),
    [
        ("dot", 64, 2, 64, 2),
        ("dot", 64, 1, 128, 4),
        ("dot", 32, 3, 64, 4),
        ("matrix", 64, 1, 128, 16),
        ("matrix", 32, 3, 512, 32),
        pytest.param("matrix", 64, 5, 64, 48, marks=pytest.mark.full),
    ],
)
def test_bits_do_not_depend_on_grid_warp_or_batch(monkeypatch, math, warp, blocks, threads, rows):
    held = 8 if math == "matrix" else 2  # of 8 rows, lanes of both halves of a warp of 64 keep fragments

    def body(layer, comm):
        inputs = [one.to(comm.device) for one in everything(2, held, 0, *SMALL)[comm.rank]]
        out, residual_out = layer(*inputs, EPS)
        comm.check()
        return out.cpu(), residual_out.cpu()

    plain = mono(2, held, body, shape=SMALL, threads=64, math=math)
    if targets.active().name == "host":
        monkeypatch.setenv("FLYCOMM_HOST_WARP", str(warp))
    other = mono(2, rows, body, "flags", blocks, threads, SMALL, math)
    assert all(same_bits(a, b) for one, two in zip(plain, other, strict=True) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("math", ["dot", "matrix"])
def test_a_late_rank_is_waited_for(math):
    def body(layer, comm):
        results = []
        for seed in range(4):
            if comm.rank == seed % 2:
                time.sleep(0.1)
            results.append(call(layer, comm, 1, seed, SMALL))
        return results

    results = mono(2, 1, body, shape=SMALL, threads=64, math=math)
    for seed in range(4):
        is_right([one[seed] for one in results], 2, 1, seed, SMALL)


@pytest.mark.parametrize(("protocol", "math"), [("packets", "dot"), ("flags", "dot"), ("packets", "matrix")])
def test_a_rank_that_does_not_come_is_an_error_and_nan(protocol, math):
    def body(layer, comm):
        inputs = [one.to(comm.device) for one in everything(2, 1, 0, *SMALL)[comm.rank]]
        layer(*inputs, EPS)
        comm.check()
        if comm.rank == 1:
            return
        out, _ = layer(*inputs, EPS)
        settle()
        with pytest.raises(CommTimeout):
            comm.check()
        assert out.isnan().all()

    mono(2, 1, body, protocol, shape=SMALL, threads=64, math=math, timeout=0.3)


def test_what_a_failed_wait_leaves_is_right_or_nan():
    """A limit so short that blocks of one device often give up on each other."""
    shape = (1024, 32, 64)  # with more blocks than cores: else nobody polls for long enough to look at the clock

    def body(layer, comm):
        for seed in range(60):
            inputs = [one.to(comm.device) for one in everything(1, 1, seed % 7, *shape)[0]]
            results = layer(*inputs, EPS)
            settle()
            try:
                comm.check()
            except CommTimeout:
                comm.recover()
            for got, want in zip(results, exact(everything(1, 1, seed % 7, *shape), 0), strict=True):
                wrong = (got.cpu().double() - want).abs() > 2**-6 * want.abs().max()  # false for NaN
                assert not wrong.any(), seed

    mono(1, 1, body, blocks=16, shape=shape, threads=64, timeout=1e-9)


def test_after_a_failure_ranks_recover():
    def body(layer, comm):
        inputs = [one.to(comm.device) for one in everything(2, 1, 0, *SMALL)[comm.rank]]
        for _ in range(3):
            layer(*inputs, EPS)
        comm.check()
        if comm.rank == 0:
            layer(*inputs, EPS)
            settle()
            with pytest.raises(CommTimeout):
                comm.check()
        comm.recover()
        return call(layer, comm, 1, 1, SMALL)

    is_right(mono(2, 1, body, shape=SMALL, threads=64, timeout=0.3), 2, 1, 1, SMALL)


def test_layers_of_two_classes_take_turns_on_one_channel():
    def body(larger, comm):
        smaller = FfnLayer(comm, "ffn", Layer(*SMALL, 1), 64)
        return [call(layer, comm, rows, rows, SMALL) for _ in range(3) for layer, rows in ((smaller, 1), (larger, 4))]

    results = mono(2, 4, body, shape=SMALL, threads=64)
    for i in range(6):
        is_right([one[i] for one in results], 2, (1, 4)[i % 2], (1, 4)[i % 2], SMALL)


def test_a_grid_over_residency_is_refused(monkeypatch):
    import flycomm.mono._layer as module

    ranks = sharing(2)
    held = 2 * ranks - 1
    monkeypatch.setattr(module, "resident_blocks", lambda kernel, target, device: held)
    says = rf"{ranks} rank\(s\) .* grid of 2 blocks .* over the {held} .* at most 1 blocks"

    def body(comm):
        with pytest.raises(ResidencyError, match=says):
            FfnLayer(comm, "ffn", Layer(*SMALL, 1), 64)

    run(2, body, kernel_channels={"ffn": (BLOCKS, slot_bytes(Layer(*SMALL, 1)))})


def test_what_does_not_fit_is_refused():
    def body(layer, comm):
        inputs = [one.to(comm.device) for one in everything(1, 2, 0, *SMALL)[0]]
        with pytest.raises(UsageError, match=r"2 rows are not in 1..1"):
            layer(*inputs)
        inputs = [one.to(comm.device) for one in everything(1, 1, 0, *SMALL)[0]]
        with pytest.raises(UsageError, match=r"down is \(32, 64\)"):
            layer(*inputs[:3], inputs[3].T.contiguous(), *inputs[4:])
        with pytest.raises(UsageError, match="contiguous"):
            layer(*inputs[:3], inputs[3].T.contiguous().T, *inputs[4:])

    mono(1, 1, body, shape=SMALL, threads=64)
    for layer, dtype, threads in ((Layer(60, 32, 16, 1), "bf16", 64), (Layer(*SMALL, 3), "bf16", 64)):
        with pytest.raises(UsageError):
            layer.check(dtype, threads)
    with pytest.raises(UsageError, match="f16"):
        Layer(*SMALL, 1).check("f16", 64)
    with pytest.raises(UsageError, match="96 threads"):
        Layer(*SMALL, 1).check("bf16", 96)
    with pytest.raises(UsageError, match="'sentinel'"):
        Layer(*SMALL, 1, "sentinel").check("bf16", 64)
    with pytest.raises(UsageError, match="32 rows with math='dot'"):
        Layer(*SMALL, 32, math="dot").check("bf16", 64)
    with pytest.raises(UsageError, match="math='tensor'"):
        Layer(*SMALL, 1, math="tensor").check("bf16", 64)


def test_a_channel_of_smaller_slots_is_refused():
    def body(layer, comm):
        with pytest.raises(UsageError, match=r"channel 'ffn' has \d+ bytes, this layer fills \d+"):
            FfnLayer(comm, "ffn", Layer(*SMALL, 48), 64)

    mono(1, 1, body, shape=SMALL, threads=64)


def test_tiles():
    assert Layer(6144, 1024, 2048, 2).tiles == {"gate_up": 1024, "down": 768, "projection": 1024}
    assert Layer(6144, 1024, 2048, 8).tiles == {"gate_up": 128, "down": 384, "projection": 128}
    assert Layer(72, 24, 10, 1, math="matrix").tiles == {"gate_up": 3, "down": 5, "projection": 1}


def test_windows_end_with_their_slice_or_nearly():
    assert [window_of(one) for one in (1, 4, 8, 9, 12, 13, 16, 24, 28)] == [1, 4, 8, 5, 6, 7, 8, 8, 7]


def test_bytes():
    layer = Layer(6144, 1024, 2048, 4)
    assert slot_bytes(layer) == 4 * 6144 * 4
    assert scratch_bytes(layer, 128) == 1024 + 4 * 768 * 4 + 4 * 1024 * 2 + 4 * 6144 * 2
