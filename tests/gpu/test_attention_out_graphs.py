# SPDX-License-Identifier: Apache-2.0
"""The mono layer behind attention at a model's size: against f64, and as one kernel node that is replayed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flycomm.kernels.mono_attention_out import Layer
from tests.gpu.test_norm_graphs import Captured, nodes
from tests.host.test_attention_out import EPS, call, everything, is_right, mono
from tests.ranks import devices, same_bits


def blocks(world):
    """A grid of which there may be as many as ranks on a device."""
    return 128 * len(set(devices(world))) // world


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
def test_hidden_6144_against_f64(rows, world):
    layer = Layer(6144, 1024, 256, 8, rows, scoring="sigmoid", bias=True, protocol="flags" if rows == 2 else "packets")

    def body(one, comm):
        first = call(one, comm, rows)
        for _ in range(20):
            assert all(same_bits(a, b) for a, b in zip(call(one, comm, rows), first, strict=True))
        return first

    results = mono(world, layer, body, blocks(world), 256, max_bytes=32 << 20)
    is_right(layer, results, world)


@pytest.mark.parametrize("router", ["bf16", "f32"])
def test_one_kernel_node_and_a_thousand_replays(router):
    pytest.importorskip("cuda.bindings", reason="counting the nodes of a graph needs cuda-bindings")
    layer = Layer(4096, 512, 128, 8, 2, router)

    def body(one, comm):
        seeds = range(4)
        inputs = [[tensor.to(comm.device) for tensor in everything(2, layer, 2, seed)[comm.rank][:5]] for seed in seeds]
        given = [tensor.clone() for tensor in inputs[0]]
        wants = [one(*some, eps=EPS) for some in inputs]
        captured = Captured(SimpleNamespace(comm=comm), lambda: one(*given, eps=EPS))
        assert nodes(captured.graph) == 1
        for turn in range(1000):
            for tensor, new in zip(given, inputs[turn % 4], strict=True):
                tensor.copy_(new)
            captured.graph.replay()
            if turn % 50 < 4:
                pairs = zip(captured.outputs, wants[turn % 4], strict=True)
                assert all(same_bits(got, want) for got, want in pairs), turn
        comm.check()

    mono(2, layer, body, blocks(2), 256, max_bytes=32 << 20)
