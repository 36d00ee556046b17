# SPDX-License-Identifier: Apache-2.0
"""The mono feed-forward layer at a model's size: against f64, and as one kernel node that is replayed, ranks apart."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from tests.gpu.test_norm_graphs import Captured, nodes
from tests.host.test_mono_ffn import EPS, call, everything, is_right, mono
from tests.ranks import devices, same_bits

SHAPE = (6144, 1024, 2048)
REPLAYS = 10_000


def blocks(world):
    """A grid of which there may be as many as ranks on a device."""
    return 128 * len(set(devices(world))) // world


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32, 48])
def test_hidden_6144_against_f64(rows, world):
    def body(one, comm):
        first = call(one, comm, rows, shape=SHAPE)
        for _ in range(20):
            assert all(same_bits(a, b) for a, b in zip(call(one, comm, rows, shape=SHAPE), first, strict=True))
        return first

    protocol = "flags" if rows == 2 else "packets"
    results = mono(world, rows, body, protocol, blocks(world), 256, SHAPE, max_bytes=32 << 20)
    is_right(results, world, rows, shape=SHAPE)


@pytest.mark.parametrize("protocol", ["packets", "flags"])
def test_one_kernel_node_and_ten_thousand_replays_with_delays(protocol):
    pytest.importorskip("cuda.bindings", reason="counting the nodes of a graph needs cuda-bindings")
    shape = (4096, 512, 1024)

    def body(one, comm):
        inputs = [[tensor.to(comm.device) for tensor in everything(2, 2, seed, *shape)[comm.rank]] for seed in range(4)]
        given = [tensor.clone() for tensor in inputs[0][:2]]
        weights = inputs[0][2:]
        wants = [one(*some[:2], *weights, EPS) for some in inputs]
        captured = Captured(SimpleNamespace(comm=comm), lambda: one(*given, *weights, EPS))
        assert nodes(captured.graph) == 1
        for turn in range(REPLAYS):
            for tensor, new in zip(given, inputs[turn % 4], strict=False):
                tensor.copy_(new)
            if turn % 97 == 13 * comm.rank:  # now one rank is late, now the other
                time.sleep(0.001 * (turn % 7))
            captured.graph.replay()
            if turn % 250 < 4:
                pairs = zip(captured.outputs, wants[turn % 4], strict=True)
                assert all(same_bits(got, want) for got, want in pairs), turn
        comm.check()

    mono(2, 2, body, protocol, blocks(2), 256, shape, max_bytes=32 << 20)
