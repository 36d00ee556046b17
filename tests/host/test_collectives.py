# SPDX-License-Identifier: Apache-2.0
"""Gathers, scatters, other reductions, symmetric memory: right to the bit on every rank, whatever the protocol."""

from __future__ import annotations

import time

import pytest
import torch

from flycomm.dtypes import REDUCTIONS
from flycomm.errors import ClosedError, UsageError
from flycomm.tables import PROTOCOLS, carries
from tests.ranks import DTYPES, run, same_bits, sample, settle

SIZES = (1, 3, 7, 8, 9, 1000, 2048, 4097, 40_003)
WORLDS = (1, 2, 3, 4, 5, 8)
# Every (world, protocol) in the quick set, the reductions, dtypes and sizes dealt out over them; all in the full set.
QUICK = [
    (world, protocol, REDUCTIONS[i % 4], list(DTYPES)[i % 3], SIZES[i % 3 :: 3])
    for i, (world, protocol) in enumerate((world, protocol) for world in WORLDS for protocol in PROTOCOLS)
]


def reduced(comm, shape, dtype, seed, op="sum"):
    """All ranks' samples reduced in rank order in f32, rounded once."""
    terms = [sample(comm, shape, dtype, seed, rank).float() for rank in range(comm.world_size)]
    total = torch.zeros(shape, device=comm.device) if op in ("sum", "avg") else terms.pop(0)
    for term in terms:
        total = total + term if op in ("sum", "avg") else getattr(torch, f"{op}imum")(total, term)
    # by a tensor: torch divides by a number with its reciprocal on GPUs
    return (total / torch.full_like(total, comm.world_size) if op == "avg" else total).to(dtype)


def check_all(comm, size, dtype, seed, op):
    """Each collective once."""
    world, rank = comm.world_size, comm.rank
    x = sample(comm, (world * size,), dtype, seed)
    want = reduced(comm, (world * size,), dtype, seed, op)
    assert same_bits(comm.all_reduce(x, op), want), ("all_reduce", rank, size, dtype, op)
    chunk = want[rank * size : (rank + 1) * size]
    assert same_bits(comm.reduce_scatter_tensor(x, op), chunk), ("reduce_scatter", rank, size, dtype, op)
    gathered = torch.cat([sample(comm, (size,), dtype, seed + 1, other) for other in range(world)])
    assert same_bits(comm.all_gather_into_tensor(sample(comm, (size,), dtype, seed + 1)), gathered), (rank, size)


@pytest.mark.parametrize(("world", "protocol", "op", "dtype", "sizes"), QUICK)
def test_each_collective(world, protocol, op, dtype, sizes):
    def body(comm):
        for seed, size in enumerate(sizes):
            check_all(comm, size, DTYPES[dtype], 2 * seed, op)

    run(world, body, protocol=protocol)


@pytest.mark.full
@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("world", range(1, 9))
def test_each_collective_at_every_size(world, protocol, dtype, op):
    def body(comm):
        for seed, size in enumerate((*SIZES, 200_000)):
            check_all(comm, size, DTYPES[dtype], 2 * seed, op)

    run(world, body, max_bytes=64 << 20, protocol=protocol)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sizes_at_the_edges_of_every_row(protocol):
    def body(comm):
        for op in ("all_reduce", "reduce_scatter", "all_gather"):
            plan, size = comm.plan(op, torch.bfloat16, 1), 0
            while plan.row.largest is not None:
                edge = plan.row.largest // 2
                for size in (edge - 1, edge, edge + 1):
                    check_all(comm, size, torch.bfloat16, size, "sum")
                plan = comm.plan(op, torch.bfloat16, 2 * size)

    run(2, body, protocol=protocol)


@pytest.mark.parametrize("protocol", ["flags", "packets"])
@pytest.mark.parametrize("world", [1, 3])
def test_gathers_of_any_dtype_in_the_first_and_the_last_dimension(world, protocol):
    shapes = {
        torch.uint8: [(5,), (3, 7), (2, 16)],
        torch.int16: [(1, 1), (4, 3, 5)],
        torch.float32: [(2, 3), (6, 4), (1, 2, 12)],
        torch.int64: [(9,), (5, 2)],
        torch.bool: [(11,)],
        torch.complex64: [(3, 3)],
    }

    def body(comm):
        for dtype, several in shapes.items():
            for shape in several:
                parts = [(sample(comm, shape, torch.float32, 5, rank) * 50).to(dtype) for rank in range(world)]
                for dim in (0, -1):
                    got = comm.all_gather_into_tensor(parts[comm.rank], dim=dim)
                    assert torch.equal(got, torch.cat(parts, dim=dim)), (dtype, shape, dim)

    run(world, body, protocol=protocol)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_outputs_in_place_strided_and_misaligned(protocol):
    def body(comm):
        world, rank, n = comm.world_size, comm.rank, 48
        x = sample(comm, (world, n), torch.bfloat16, 0)
        want = reduced(comm, (world, n), torch.bfloat16, 0)
        assert same_bits(comm.reduce_scatter_tensor(x.clone().t().contiguous().t())[0], want[rank])
        own = x.clone()
        comm.reduce_scatter_tensor(own, out=own[rank : rank + 1])
        assert same_bits(own[rank], want[rank])
        assert same_bits(own[rank - 1], x[rank - 1]) or world == 1
        odd = torch.zeros(n + 1, dtype=x.dtype, device=x.device)
        comm.reduce_scatter_tensor(x.view(-1), out=odd[1:])
        assert same_bits(odd[1:], want[rank])

        gathered = torch.cat([sample(comm, (1, n), torch.bfloat16, 1, other) for other in range(world)])
        whole = torch.zeros_like(gathered)
        whole[rank] = gathered[rank]
        assert comm.all_gather_into_tensor(whole[rank : rank + 1], out=whole) is whole
        assert same_bits(whole, gathered)
        wide = torch.zeros(world, n + 3, dtype=x.dtype, device=x.device)
        comm.all_gather_into_tensor(gathered[rank : rank + 1], out=wide[:, 1 : n + 1])
        assert same_bits(wide[:, 1 : n + 1], gathered)

    run(3, body, protocol=protocol)


def test_what_torch_negates_or_conjugates_when_it_reads():
    def body(comm):
        numbers = torch.arange(8, dtype=torch.float32, device=comm.device) + comm.rank
        negated = torch._neg_view(numbers)
        assert torch.equal(comm.all_reduce(negated), -(2 * torch.arange(8.0) + 1).to(comm.device))
        conjugated = torch.complex(numbers, numbers + 1).conj()
        gathered = comm.all_gather_into_tensor(conjugated).view(2, 8)
        assert torch.equal(gathered[comm.rank], conjugated)
        assert torch.equal(gathered.imag, -(gathered.real + 1))
        assert torch.equal(comm.all_reduce_(negated), negated)
        assert torch.equal(numbers, (2 * torch.arange(8.0) + 1).to(comm.device)), "written through the view"

    run(2, body)


def test_what_cannot_be_done_is_one_sentence():
    def body(comm):
        x = torch.zeros(6, 4, device=comm.device)
        for call, words in (
            (lambda: comm.reduce_scatter_tensor(x[:5]), "has 5 rows, not a multiple of 3 ranks; pad it"),
            (lambda: comm.all_gather_into_tensor(x.view(2, 3, 4), dim=1), "is not the first or the last; use 0 or -1"),
            (lambda: comm.all_gather_into_tensor(x, out=x), "pass an out that is like the result"),
            (lambda: comm.reduce_scatter_tensor(x, out=x[1:3]), "overlap without being the part"),
            (lambda: comm.all_reduce(x, "product"), "'product' is not one of sum, avg, max, min"),
            (lambda: comm.reduce_scatter_tensor(x.double()), "float64 is not one of"),
            (lambda: comm.empty((0, 4), torch.float32), "no elements; give it at least one"),
        ):
            if words.startswith("overlap") and comm.rank == 0:
                continue  # rank 0's own chunk is x[0:2]; x[1:3] overlaps it all the same
            with pytest.raises(UsageError, match=words.replace("(", r"\(")):
                call()

    run(3, body)


def test_max_and_min_keep_nan_and_the_order_of_zeros():
    def body(comm):
        x = torch.tensor([1.0, float("nan"), -0.0, float("inf"), -2.0], device=comm.device)
        if comm.rank == 1:
            x = torch.tensor([2.0, 1.0, 0.0, float("-inf"), float("nan")], device=comm.device)
        high, low = comm.all_reduce(x, "max").cpu(), comm.all_reduce(x, "min").cpu()
        assert torch.equal(high.isnan(), torch.tensor([False, True, False, False, True]))
        assert torch.equal(low.isnan(), high.isnan())
        assert (high[0], high[3], low[0], low[3]) == (2, float("inf"), 1, float("-inf"))
        assert not high[2].signbit()
        assert low[2].signbit()

    for protocol in PROTOCOLS:
        run(2, body, protocol=protocol)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_symmetric_memory_is_reduced_where_it_lies(world):
    def body(comm):
        cases = ((5, "bf16", "sum"), (3001, "f32", "avg"), (70_001, "f16", "max"), (9000, "bf16", "min"))
        for size, dtype, op in cases:
            one = comm.empty((size,), DTYPES[dtype])
            for seed in range(3):
                one.tensor.copy_(sample(comm, (size,), DTYPES[dtype], seed))
                want = reduced(comm, (size,), DTYPES[dtype], seed, op)
                assert same_bits(one.all_reduce(op), want)
                out = torch.zeros_like(want)
                assert one.all_reduce(op, out=out) is out
                assert same_bits(out, want)
                if comm.rank == seed % world:
                    time.sleep(0.01)  # its peers may not write before it has read
                assert one.all_reduce_(op) is one.tensor
                assert same_bits(one.tensor, want)
                comm.barrier()
                settle()  # a copy from another GPU that waits on the stream may hold up other ranks' copies
                assert same_bits(one.peer((comm.rank + 1) % world).clone(), want)
                comm.barrier()
            one.close()
            with pytest.raises(ClosedError, match="symmetric tensor is closed"):
                one.all_reduce()

    run(world, body)


def test_carrying_is_refused_where_bits_would_be_lost():
    assert not carries("sentinel", "all_gather", "")
    assert not carries("sentinel", "all_reduce", "max")
    assert carries("sentinel", "reduce_scatter", "avg")
    assert not carries("two_shot", "reduce_scatter", "sum")
