# SPDX-License-Identifier: Apache-2.0
"""All-reduce: right to the bit on every rank, whatever the size, the dtype, the world and the history."""

from __future__ import annotations

import time

import pytest
import torch

from flycomm.tables import PROTOCOLS
from tests.ranks import DTYPES, rank_order_sum, run, same_bits, sample

SIZES = (0, 1, 7, 8, 9, 4095, 4096, 4097, 65536, 100_003)
WORLDS = (1, 2, 3, 4, 5, 8)

# Every pair of (world, dtype) and of (world, protocol) in the quick set, with sizes dealt out over them; everything in
# the full set.
QUICK = [
    (world, dtype, PROTOCOLS[(i + i // 3) % 3], SIZES[i % 3 :: 3])
    for i, (world, dtype) in enumerate((world, dtype) for world in WORLDS for dtype in DTYPES)
]


def _check(comm, shape, dtype, seed):
    x = sample(comm, shape, dtype, seed)
    before = x.clone()
    result = comm.all_reduce(x)
    assert result.shape == x.shape
    assert result.is_contiguous()
    assert same_bits(x, before), "the input changed"
    assert same_bits(result, rank_order_sum(comm, shape, dtype, seed)), (comm.rank, shape, dtype)
    return result


@pytest.mark.parametrize(("world", "dtype", "protocol", "sizes"), QUICK)
def test_equals_the_rank_order_sum(world, dtype, protocol, sizes):
    def body(comm):
        for seed, size in enumerate(sizes):
            _check(comm, (size,), DTYPES[dtype], seed)

    run(world, body, protocol=protocol)


@pytest.mark.full
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", range(1, 9))
def test_every_size(world, dtype, protocol):
    def body(comm):
        for seed, size in enumerate((*SIZES, 1 << 20)):
            _check(comm, (size,), DTYPES[dtype], seed)

    run(world, body, max_bytes=128 << 20, protocol=protocol)


def test_a_million_elements():
    run(2, lambda comm: _check(comm, (1 << 20,), torch.float32, 3), max_bytes=64 << 20)


@pytest.mark.parametrize("protocol", ["flags", "two_shot", "packets"])
def test_a_message_larger_than_staging_goes_in_pieces(protocol):
    """In one launch; the last piece is short, and with two-shot some ranks own nothing of it."""

    def body(comm):
        plan = comm.plan("all_reduce", torch.float32, 4 * 300_001)
        assert plan.row.capacity < 300_001
        for size in (300_001, plan.row.capacity // 4 * comm.world_size * 2 + 5, 4):
            _check(comm, (size,), torch.float32, size)

    run(3, body, max_bytes=2 << 20, protocol=protocol)


@pytest.mark.parametrize("world", [2, 5])
def test_strides_and_alignment(world):
    def body(comm):
        base = sample(comm, (64, 33), torch.bfloat16, 0)
        want = rank_order_sum(comm, (64, 33), torch.bfloat16, 0)
        assert same_bits(comm.all_reduce(base.t()), want.t().contiguous())
        assert same_bits(comm.all_reduce(base[1:, ::2]), want[1:, ::2].contiguous())
        assert same_bits(comm.all_reduce(base.view(-1)[1:]), want.view(-1)[1:])
        assert same_bits(comm.all_reduce(base.expand(2, 64, 33)), want.expand(2, 64, 33).contiguous())

    run(world, body)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_out_and_in_place(world):
    def body(comm):
        x = sample(comm, (1000,), torch.float16, 0)
        want = rank_order_sum(comm, (1000,), torch.float16, 0)
        out = torch.full_like(x, 7)
        assert comm.all_reduce(x, out=out) is out
        assert same_bits(out, want)
        odd = torch.full((1001,), 7, dtype=x.dtype, device=x.device)
        comm.all_reduce(x, out=odd[1:])
        assert same_bits(odd[1:], want)
        assert odd[0] == 7
        assert comm.all_reduce_(x) is x
        assert same_bits(x, want)
        wide = sample(comm, (10, 20), torch.float16, 1)
        comm.all_reduce_(wide[:, 3:8])
        assert same_bits(wide[:, 3:8], rank_order_sum(comm, (10, 20), torch.float16, 1)[:, 3:8])

    run(world, body)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_special_values_have_the_same_bits_everywhere(protocol):
    values = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40, 3.0e38, 6e-8, 65504.0]

    def body(comm):
        x = torch.tensor(values, device=comm.device).roll(comm.rank)
        zeros = [comm.all_reduce(-torch.zeros(9, dtype=dtype, device=comm.device)).cpu() for dtype in DTYPES.values()]
        return comm.all_reduce(x).cpu(), comm.all_reduce(x.half()).cpu(), zeros

    results = run(3, body, protocol=protocol)
    for total, half, zeros in results:
        assert same_bits(total, results[0][0])
        assert same_bits(half, results[0][1])
        assert all(same_bits(zero, torch.zeros_like(zero)) for zero in zeros), "a sum starts from +0.0"


def test_every_protocol_gives_the_same_bits():
    def body(comm):
        return [comm.all_reduce(sample(comm, (5000,), dtype, 3)).cpu() for dtype in DTYPES.values()]

    by_protocol = [run(5, body, protocol=protocol) for protocol in PROTOCOLS]
    flat = [[result for rank in ranks for result in rank] for ranks in by_protocol]
    for results in zip(*flat, strict=True):
        assert all(same_bits(result, results[0]) for result in results)


def test_words_equal_to_the_sentinel_are_sums_like_any_other():
    def body(comm):
        x = torch.full((40,), -0.0, device=comm.device)
        x[::3] = 1.0 + comm.rank
        want = torch.zeros(40)
        want[::3] = 3.0
        assert same_bits(comm.all_reduce(x).cpu(), want)
        pairs = torch.tensor([0.0, -0.0, 2.0, -0.0] * 10, dtype=torch.bfloat16, device=comm.device)
        assert same_bits(comm.all_reduce(pairs).cpu(), torch.tensor([0.0, 0.0, 4.0, 0.0] * 10, dtype=torch.bfloat16))

    run(2, body, protocol="sentinel")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_late_rank_is_waited_for(protocol):
    def body(comm):
        for late in range(comm.world_size):
            if comm.rank == late:
                time.sleep(0.05)
            _check(comm, (5000,), torch.bfloat16, late)

    run(3, body, protocol=protocol)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("calls", [2_000, pytest.param(10_000, marks=pytest.mark.full)])
def test_many_calls_with_changing_sizes(protocol, calls):
    sizes = torch.randint(0, 2600, (calls,), generator=torch.Generator().manual_seed(7)).tolist()

    def body(comm):
        x = (torch.arange(2600, device=comm.device) % 64 + comm.rank).to(torch.bfloat16)
        scale = comm.world_size * (torch.arange(2600, device=comm.device) % 64) + sum(range(comm.world_size))
        want = scale.to(torch.bfloat16)
        for call, size in enumerate(sizes):
            size = 0 if call % 17 == 0 else size
            assert torch.equal(comm.all_reduce(x[:size]), want[:size]), (comm.rank, call, size)

    run(2, body, protocol=protocol)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("world", [2, 3])
def test_epochs_wrap(world, protocol):
    def body(comm):
        comm._session.channels.reset(epoch=0xFFFFFFF0)
        comm._session.world.barrier()
        for seed in range(40):
            _check(comm, (100 + 900 * (seed % 3),), torch.float32, seed)
        comm.barrier()

    run(world, body, protocol=protocol)


def test_two_communicators():
    def body(comm):
        import flycomm

        with flycomm.init(
            world=comm._session.world, name=f"second{comm.rank}", fallback="error", max_bytes=4 << 20
        ) as other:
            for seed in range(5):
                _check(comm, (300,), torch.float32, seed)
                _check(other, (300,), torch.float32, seed + 10)

    run(3, body)


def test_channels_are_independent():
    def body(comm):
        for seed in range(6):
            x = sample(comm, (500,), torch.float32, seed)
            result = comm.all_reduce(x, channel=seed % 2)
            assert same_bits(result, rank_order_sum(comm, (500,), torch.float32, seed))

    run(2, body, channels=2)
