# SPDX-License-Identifier: Apache-2.0
"""The indexer in one launch on GPUs: one kernel node, replayed with other lengths, tables, queries and caches."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests import indexer_oracle as oracle
from tests.gpu.test_norm_graphs import Captured, nodes
from tests.host.test_mono_indexer import MANY, OF_BLOCKS, OF_TOKENS, call, check, indexed, inputs, projection_of
from tests.indexer_oracle import TOKENS
from tests.ranks import same_bits

_STEPS = 8  # that replays take in turn
BLOCKS = 32  # of a grid: as many as ranks that share a device
CASES = [
    replace(OF_BLOCKS, world=2, cache="replicated", mode="owner"),
    replace(OF_BLOCKS, world=3, granule=256, seq_lens=(6000, 700, 130), most=6144),
    replace(OF_TOKENS, world=2, granule=1, mode="shard", seq_lens=(3900, 20, 3000), most=4096, heads=64),
    replace(MANY, world=2, indexer=replace(TOKENS, k=2048), seq_lens=(40000, 5000, 77), most=40960),
]


@pytest.mark.parametrize("case", CASES, ids=["owner", "all", "shard", "dsa"])
def test_one_kernel_node_and_a_thousand_replays_with_changing_lengths(case):
    pytest.importorskip("cuda.bindings", reason="counting the nodes of a graph needs cuda-bindings")

    def body(layer, comm):
        steps = oracle.several(case, _STEPS)
        for step in steps[:2]:
            check(layer, comm, step)
        given = [inputs(comm, step) for step in steps]
        want = [[torch.from_numpy(one).to(comm.device) for one in oracle.expected(step, comm.rank)] for step in steps]
        want = [[*one, projection_of(x)] for one, x in zip(want, given, strict=True)]
        x = {name: one.clone() for name, one in given[0].items()}
        plan = layer.indexer.plan(x["seq_lens"], x["ends"], case.rows)

        def step():
            found, projected = layer(x["q"], x["weights"], x["cache"], x["table"], plan, x["x"], x["projection"])
            return (*found, projected)

        captured = Captured(SimpleNamespace(comm=comm), step)
        assert nodes(captured.graph) == 1
        planned = Captured(SimpleNamespace(comm=comm), lambda: call(layer, comm, case, x))  # its plan in the graph
        wrong = torch.zeros((), dtype=torch.int64, device=comm.device)
        for turn in range(1000):
            at = (turn * 5 + turn // _STEPS) % _STEPS
            for name, one in x.items():
                one.copy_(given[at][name])
            planned.graph.replay()
            for one, expected in zip(planned.outputs, want[at], strict=True):
                words = torch.int32 if one.element_size() == 4 else torch.int16
                wrong += (one.view(words) != expected.view(words)).sum()
            if turn % 250 == 0:  # an eager step between
                check(layer, comm, steps[at])
        assert wrong.item() == 0
        for one, same in zip(call(layer, comm, steps[0]), call(layer, comm, steps[0]), strict=True):
            assert same_bits(one, same)
        comm.check()

    indexed(case, body, blocks=BLOCKS, threads=256, patience=300.0)
