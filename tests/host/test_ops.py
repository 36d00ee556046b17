# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.flycomm``, under the compiler too, and the flags and buffers of a user's own protocol."""

from __future__ import annotations

import importlib.util
import pathlib
import shutil

import pytest
import torch

import flycomm.ops  # noqa: F401  (registers the ops)
from flycomm.errors import ClosedError, UsageError
from tests.ranks import rank_order_sum, run, same_bits, sample, settle


def test_the_three_forms():
    def body(comm):
        x = sample(comm, (77,), torch.bfloat16, 0)
        want = rank_order_sum(comm, (77,), torch.bfloat16, 0)
        assert same_bits(torch.ops.flycomm.all_reduce(x, "sum", comm.group_name), want)
        out = torch.empty_like(x)
        assert torch.ops.flycomm.all_reduce_out(x, "sum", comm.group_name, out=out) is None
        assert same_bits(out, want)
        assert torch.ops.flycomm.all_reduce_(x, "sum", comm.group_name) is None
        assert same_bits(x, want)
        torch.ops.flycomm.barrier(comm.group_name)

    run(2, body)


def test_gathers_and_scatters():
    def body(comm):
        name, world, rank = comm.group_name, comm.world_size, comm.rank
        x = sample(comm, (world * 4, 6), torch.float16, 0)
        want = rank_order_sum(comm, (world * 4, 6), torch.float16, 0)[4 * rank : 4 * rank + 4]
        ops = torch.ops.flycomm
        assert same_bits(ops.reduce_scatter_tensor(x, "sum", world, name), want)
        out = torch.empty_like(want)
        assert ops.reduce_scatter_tensor_out(x, "sum", world, name, out=out) is None
        assert same_bits(out, want)
        parts = [sample(comm, (2, 6), torch.float16, 1, other) for other in range(world)]
        assert same_bits(ops.all_gather_into_tensor(parts[rank], world, name), torch.cat(parts))
        wide = torch.empty(2, 6 * world, dtype=x.dtype, device=x.device)
        assert ops.all_gather_into_tensor_out(parts[rank], world, name, -1, out=wide) is None
        assert same_bits(wide, torch.cat(parts, dim=-1))
        with pytest.raises(UsageError, match="group_size=5 is not the 3 ranks"):
            ops.all_gather_into_tensor(parts[rank], 5, name)

    run(3, body)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_whole(backend):
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("c++")):
        pytest.skip("inductor needs a C++ compiler on this machine")

    def body(comm):
        name = comm.group_name

        def layer(x):
            y = torch.ops.flycomm.all_reduce(x * 2, "sum", name)
            torch.ops.flycomm.all_reduce_(y, "sum", name)
            return y + 1

        x = sample(comm, (5, 9), torch.float32, 0)
        want = layer(x)
        if comm.rank == 0:  # dynamo compiles in one thread at a time
            comm._session.world.barrier()
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        got = compiled(x)
        assert torch.equal(got, want)

    run(1, lambda comm: body(comm))


def test_fakes_need_no_communicator():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(4, 6).t()
        y = torch.ops.flycomm.all_reduce(x, "sum", "nobody")
        assert y.shape == x.shape
        assert y.is_contiguous()
        torch.ops.flycomm.all_reduce_(x, "sum", "nobody")
        assert torch.ops.flycomm.all_gather_into_tensor(x, 3, "nobody", -1).shape == (6, 12)
        assert torch.ops.flycomm.reduce_scatter_tensor(x, "sum", 2, "nobody").shape == (3, 4)


def test_signals_order_what_is_put_into_buffers():
    def body(comm):
        size, rank = comm.world_size, comm.rank
        right, left = (rank + 1) % size, (rank - 1) % size
        mine = comm.get_buffer(rank, (2, 64), torch.float32)
        theirs = comm.get_buffer(right, (2, 64), torch.float32)
        for turn in range(20):
            settle()  # a copy to another GPU that waits on the stream may hold up other ranks' copies
            theirs[turn % 2].copy_(torch.full((64,), 100.0 * turn + rank, device=comm.device))
            comm.put_signal(right, 3)
            comm.wait_signal(left, 3)
            assert torch.all(mine[turn % 2] == 100.0 * turn + left)
            comm.put_signal(left, 4)  # I have read: the other half of the pair of buffers is free
            comm.wait_signal(right, 4)

    run(3, body)


def test_signals_are_counted():
    def body(comm):
        if comm.rank == 0:
            for _ in range(5):
                comm.put_signal(1, 0)
        else:
            for _ in range(5):
                comm.wait_signal(0, 0)
        comm.barrier()
        comm.check()

    run(2, body)


def test_get_buffer_is_typed_and_bounded():
    def body(comm):
        view = comm.get_buffer(comm.rank, (4, 4), torch.int64, storage_offset=2)
        view.fill_(comm.rank + 1)
        comm.barrier()
        other = (comm.rank + 1) % comm.world_size
        assert torch.all(comm.get_buffer(other, (16,), torch.int64, storage_offset=2) == other + 1)
        comm.barrier()
        with pytest.raises(UsageError, match=r"outside the buffer of 1048576 bytes; pass a larger max_bytes"):
            comm.get_buffer(0, (1 << 20,), torch.float32)

    run(2, body)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_the_kernel_of_the_example_gives_the_ops_bits(world):
    path = pathlib.Path(__file__).parents[2] / "examples" / "02_in_kernel.py"
    spec = importlib.util.spec_from_file_location("in_kernel", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    def body(comm):
        for seed in range(4):
            x = sample(comm, (example.ELEMENTS,), torch.float32, seed)
            bias = torch.zeros_like(x)
            fused = example.in_kernel(comm, x, bias)
            assert same_bits(fused, torch.ops.flycomm.all_reduce(x * x, "sum", comm.group_name) + bias)

    run(world, body, kernel_channels={"squares": (1, example.ELEMENTS * 4)})


def test_bad_input_says_what_to_do():
    def body(comm):
        x = torch.zeros(8, device=comm.device)
        cases = [
            (lambda: comm.all_reduce(x.double()), r"float64 is not one of .*; convert the tensor"),
            (lambda: comm.all_reduce(x, "product"), r"'product' is not one of sum, avg, max, min; use one of these"),
            (lambda: comm.all_reduce(x.to("meta")), r"tensor is on meta, this communicator on .*; move the tensor"),
            (lambda: comm.all_reduce(x, out=x[:4]), r"pass an out that is like the result"),
            (lambda: comm.all_reduce(x[:6], out=x[2:]), r"input and output overlap without"),
            (lambda: comm.all_reduce(x, channel=3), r"channel 3 is not in 0..0; pass a larger channels= to init"),
            (lambda: comm.all_reduce(torch.zeros(3 << 20, device=comm.device)), r"over max_bytes=8388608; pass a"),
            (lambda: comm.put_signal(9), r"rank 9 is not in 0..1"),
            (lambda: comm.put_signal(comm.rank), r"cannot signal itself"),
            (lambda: comm.wait_signal(1 - comm.rank, 99), r"signal channel 99 is not in 0..15"),
            (lambda: comm.peers("layer"), r"no kernel channel is named 'layer'"),
            (lambda: torch.ops.flycomm.all_reduce(x, "sum", "nobody"), r"no communicator is named 'nobody'"),
        ]
        for call, words in cases:
            with pytest.raises(UsageError, match=words):
                call()
        assert not comm.should_use(x.double())
        assert comm.should_use(x)
        comm.barrier()

    run(2, body)


def test_fallback_none_gives_none():
    def body(comm):
        assert comm.all_reduce(torch.zeros(4, dtype=torch.float64, device=comm.device)) is None
        assert comm.all_reduce(torch.ones(4, device=comm.device)).tolist() == [2.0] * 4

    run(2, body, fallback="none")


def test_use_after_close_and_two_of_one_name():
    import flycomm

    def body(comm):
        comm._session.world.barrier()
        with pytest.raises(UsageError, match=r"named .* exists already; close it, or pass another name="):
            flycomm.init(world=comm._session.world, name=comm.group_name, max_bytes=4 << 20)
        comm._session.world.barrier()
        comm.close()
        comm.close()
        with pytest.raises(ClosedError, match=r"is closed; make another with flycomm.init"):
            comm.all_reduce(torch.zeros(4, device=comm.device))

    run(2, body)


def test_options_are_checked():
    import flycomm

    for options, words in (
        ({"fallback": "maybe"}, r"fallback='maybe' is not one of group, error, none"),
        ({"timeout": -1.0}, r"timeout=-1.0 is not a number of seconds"),
        ({"channels": 0}, r"channels=0 is not in 1..16"),
        ({"max_bytes": 1000}, r"max_bytes=1000 is too small .* pass at least that"),
    ):
        with pytest.raises(UsageError, match=words):
            run(1, lambda comm: None, **options)
    with pytest.raises(UsageError, match=r"world of 9 ranks is over the limit of 8"):
        run(9, lambda comm: None)
    assert flycomm.__version__
