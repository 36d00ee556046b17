# SPDX-License-Identifier: Apache-2.0
"""Captured collectives: the epochs are on the device, so a graph may be replayed, recaptured and mixed with eager."""

from __future__ import annotations

import pytest
import torch

from flycomm.errors import ResidencyError, StreamError
from tests.ranks import rank_order_sum, run, same_bits, sample


class Captured:
    """``calls`` all-reduces of one input in one graph, captured on the rank's own stream."""

    def __init__(self, comm, sizes, dtype=torch.bfloat16):
        self.inputs = [torch.zeros(size, dtype=dtype, device=comm.device) for size in sizes]
        comm.prepare([dtype], [x.numel() * x.element_size() for x in self.inputs])
        torch.cuda.synchronize()
        comm._session.world.barrier()
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        for turn in range(comm.world_size):  # a capture is not a thing of one thread: one rank at a time
            if turn == comm.rank:
                with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                    self.outputs = [comm.all_reduce(x) for x in self.inputs]
                torch.cuda.synchronize()
            comm._session.world.barrier()

    def check(self, comm, seed):
        """One replay with new inputs, against the rank-order sum."""
        for index, x in enumerate(self.inputs):
            x.copy_(sample(comm, x.shape, x.dtype, seed + index))
        self.graph.replay()
        for index, (x, y) in enumerate(zip(self.inputs, self.outputs, strict=True)):
            assert same_bits(y, rank_order_sum(comm, x.shape, x.dtype, seed + index)), (comm.rank, seed, index)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_replays_with_new_inputs_and_eager_between(world):
    def body(comm):
        captured = Captured(comm, (100, 4096, 40_000))
        for seed in range(30):
            captured.check(comm, seed)
            if seed % 3 == 0:
                x = sample(comm, (777,), torch.float32, seed)
                assert same_bits(comm.all_reduce(x), rank_order_sum(comm, (777,), torch.float32, seed))
        comm.check()

    run(world, body, max_bytes=16 << 20)


def test_a_thousand_replays():
    def body(comm):
        x = torch.zeros(4096, dtype=torch.float32, device=comm.device)
        captured = Captured(comm, (4096,), torch.float32)
        x = captured.inputs[0]
        wrong = torch.zeros((), dtype=torch.int64, device=comm.device)
        ramp = torch.arange(4096, device=comm.device, dtype=torch.float32) % 128
        for turn in range(1000):
            x.copy_(ramp).add_(float(turn + comm.rank))
            captured.graph.replay()
            want = comm.world_size * (ramp + turn) + sum(range(comm.world_size))
            wrong += (captured.outputs[0] != want).sum()
        assert wrong.item() == 0
        comm.check()

    run(2, body)


def test_two_graphs_and_a_recapture():
    def body(comm):
        first, second = Captured(comm, (64, 64)), Captured(comm, (2000,))
        for seed in range(10):
            first.check(comm, seed)
            second.check(comm, seed)
        del first
        third = Captured(comm, (64,))
        for seed in range(10):
            third.check(comm, seed)
            second.check(comm, seed)

    run(2, body)


def test_a_captured_all_reduce_is_one_kernel_node(tmp_path):
    def body(comm):
        comm.prepare([torch.float32], [4096])
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        x = torch.zeros(1024, device=comm.device)
        out = torch.empty_like(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            comm.all_reduce(x, out=out)
        path = tmp_path / "graph.dot"
        graph.enable_debug_mode()
        torch.cuda.synchronize()
        from cuda.bindings import runtime

        error, _, count = runtime.cudaGraphGetNodes(runtime.cudaGraph_t(init_value=graph.raw_cuda_graph()), 0)
        assert int(error) == 0, path
        return count

    pytest.importorskip("cuda.bindings", reason="counting the nodes of a graph needs cuda-bindings")
    assert run(1, body) == [1]


def test_another_stream_raises_until_the_channel_is_handed_over():
    def body(comm):
        x = sample(comm, (64,), torch.float32, 0)
        want = rank_order_sum(comm, (64,), torch.float32, 0)
        assert same_bits(comm.all_reduce(x), want)
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            with pytest.raises(StreamError, match=r"hand it over with use_stream\(\), or use another channel"):
                comm.all_reduce(x)
            comm.use_stream(other)
            assert same_bits(comm.all_reduce(x), want)
        torch.cuda.current_stream().wait_stream(other)

    run(2, body)


def test_two_streams_on_two_channels():
    def body(comm):
        comm.prepare([torch.float32], [4096])
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        for seed in range(20):
            x, y = (sample(comm, (1000,), torch.float32, seed + k) for k in (0, 100))
            torch.cuda.current_stream().synchronize()
            one = comm.all_reduce(x, channel=0)
            with torch.cuda.stream(other):
                two = comm.all_reduce(y, channel=1)
            other.synchronize()
            assert same_bits(one, rank_order_sum(comm, (1000,), torch.float32, seed))
            assert same_bits(two, rank_order_sum(comm, (1000,), torch.float32, seed + 100))

    run(2, body, channels=2)


def test_more_waiting_blocks_than_the_device_holds_are_refused():
    with pytest.raises(
        ResidencyError, match=r"want \d+ threads to wait .* over the \d+ that the device keeps resident"
    ):
        run(2, lambda comm: None, kernel_channels={"large": (1000, 4096)})


@pytest.mark.full
def test_a_million_calls():
    def body(comm):
        x = torch.full((512,), float(comm.rank + 1), device=comm.device)
        out = torch.empty_like(x)
        comm.prepare([torch.float32], [2048])
        comm.all_reduce(x, out=out)
        torch.cuda.synchronize()
        comm._session.world.barrier()
        graph = torch.cuda.CUDAGraph()
        for turn in range(comm.world_size):
            if turn == comm.rank:
                with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                    for _ in range(500):
                        comm.all_reduce(x, out=out)
            comm._session.world.barrier()
        before = torch.cuda.memory_allocated()
        comm._session.world.barrier()  # ranks may share a device, and so its allocator
        for _ in range(2000):
            graph.replay()
        torch.cuda.synchronize()
        comm.check()
        comm._session.world.barrier()
        assert torch.cuda.memory_allocated() == before
        comm._session.world.barrier()
        assert torch.all(out == sum(range(1, comm.world_size + 1)))

    run(2, body)
