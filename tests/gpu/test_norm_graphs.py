# SPDX-License-Identifier: Apache-2.0
"""The fused norm, of rows and of experts' sums, in a graph: one kernel node, replayed with other inputs."""

from __future__ import annotations

import pytest
import torch

from tests.host.expert_reference import Case
from tests.host.test_expert_reduce import EPS, Call
from tests.ranks import run, same_bits

STEPS = 4  # that replays take in turn


class Captured:
    """One call in a graph on the rank's own stream; ``call`` has the tensors that it reads."""

    def __init__(self, call, body):
        body()  # loads the kernel
        torch.cuda.synchronize()
        call.comm._session.world.barrier()
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        for turn in range(call.comm.world_size):  # a capture is not a thing of one thread: one rank at a time
            if turn == call.comm.rank:
                stream = torch.cuda.current_stream()
                with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                    self.outputs = body()
                self.graph.instantiate()
                torch.cuda.synchronize()
            call.comm._session.world.barrier()


def nodes(graph):
    from cuda.bindings import runtime

    error, _, count = runtime.cudaGraphGetNodes(runtime.cudaGraph_t(init_value=graph.raw_cuda_graph()), 0)
    assert int(error) == 0
    return count


@pytest.mark.parametrize("rows", [1, 17, 48])
@pytest.mark.parametrize("layout", ["dense", "permuted", None])
def test_one_kernel_node_and_a_thousand_replays(rows, layout):
    def body(comm):
        hidden, case = 4096, Case(layout or "dense", "bf16", 2, "f32", shared=layout == "permuted")
        calls = [Call(comm, case, rows, hidden, seed) for seed in range(STEPS)]
        inputs = [{"own": call.own(), "residual": call.residual, **call.mine} for call in calls]
        given = {name: one if one is None else one.clone() for name, one in inputs[0].items()}
        if layout == "permuted":  # ranks hold other numbers of rows from call to call
            given["expert_out"] = torch.zeros((rows * case.topk, hidden), dtype=torch.bfloat16, device=comm.device)
        names = ("expert_out", "topk_weights", "index", "shared")

        def step():
            if layout is None:
                return comm.all_reduce_rms_norm(given["own"], given["residual"], calls[0].weight, EPS)
            out, weights, index, shared = (given[name] for name in names)
            call = comm.moe_finalize_all_reduce_rms_norm
            return call(out, weights, given["residual"], calls[0].weight, EPS, index=index, shared=shared)

        wants = [comm.all_reduce_rms_norm(one["own"], one["residual"], calls[0].weight, EPS) for one in inputs]

        def put(inputs):
            for name, one in inputs.items():
                if one is not None:
                    given[name][: len(one)].copy_(one)

        put(inputs[0])
        captured = Captured(calls[0], step)
        assert nodes(captured.graph) == 1
        wrong = torch.zeros((), dtype=torch.int64, device=comm.device)
        for turn in range(1000):
            put(inputs[turn % STEPS])
            captured.graph.replay()
            for one, want in zip(captured.outputs, wants[turn % STEPS], strict=True):
                wrong += (one.view(torch.int16) != want.view(torch.int16)).sum()
            if turn % 250 == 0:  # an eager call between
                assert all(same_bits(a, b) for a, b in zip(step(), wants[turn % STEPS], strict=True))
        assert wrong.item() == 0
        comm.check()

    pytest.importorskip("cuda.bindings", reason="counting the nodes of a graph needs cuda-bindings")
    run(2, body, patience=300.0, max_bytes=64 << 20)
