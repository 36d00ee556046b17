# SPDX-License-Identifier: Apache-2.0
"""A captured step of an indexer: its plan and its decode, replayed with other lengths, tables, queries and caches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from flycomm.indexer.scores import IndexScores
from tests import indexer_oracle as oracle
from tests.indexer_oracle import BLOCKS, TOKENS, Case
from tests.ranks import run

_STEPS = 8  # that replays take in turn
CASES = [
    Case(world=2, indexer=TOKENS, granule=1),
    Case(world=2, indexer=TOKENS, granule=64, cache="replicated", parallel=False),
    Case(world=2, indexer=TOKENS, granule=1, seq_lens=(3900, 20, 65, 3000), most=40000),
    Case(world=2, indexer=BLOCKS, granule=128, page=128, cache="replicated", mode="owner"),
    Case(world=3, indexer=replace(TOKENS, k=600), granule=64, mode="shard", seq_lens=(3900, 20, 65, 3000), most=4096),
    Case(world=2, indexer=TOKENS, cache="replicated", seq_lens=(3900, 20, 65, 3000), most=4096, width=128, heads=64),
    Case(world=2, indexer=BLOCKS, granule=128, page=128, mode="owner", width=128),
]
FORMATS = {128: {"dsa": "e4m3fn", "block_max": "bf16"}}  # of the scoring kernel, by width and kind


def given(comm, case):
    x = oracle.inputs(comm, case)
    return oracle.packed(x, FORMATS[case.width][case.indexer.kind]) if case.width in FORMATS else x


def made(comm, case):
    scorer = None
    if case.width in FORMATS:
        scorer = IndexScores(comm, case.indexer, FORMATS[case.width][case.indexer.kind], case.heads, case.page)
    return oracle.made(comm, case, scorer)


class Captured:
    """One step in a graph, on the rank's own stream; all that it reads is copied over before a replay."""

    def __init__(self, comm, indexer, case):
        self.given = given(comm, case)
        self.step(indexer, case)  # loads what the graph will launch
        torch.cuda.synchronize()
        comm._session.world.barrier()
        self.graph = torch.cuda.CUDAGraph()
        for turn in range(comm.world_size):  # a capture is not a thing of one thread: one rank at a time
            if turn == comm.rank:
                stream = torch.cuda.current_stream()
                with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                    self.found = self.step(indexer, case)
                torch.cuda.synchronize()
            comm._session.world.barrier()

    def step(self, indexer, case):
        x = self.given
        plan = indexer.plan(x["seq_lens"], x["ends"], case.rows)
        return indexer.decode(x["q"], x["weights"], x["cache"], x["table"], plan)

    def replay(self, inputs):
        for name, one in self.given.items():
            one.copy_(inputs[name])
        self.graph.replay()
        return self.found


@pytest.mark.parametrize("case", CASES, ids=["all", "alone", "long", "owner", "shard", "fp8", "blocks"])
def test_a_thousand_replays_with_changing_lengths(case):
    def body(comm):
        steps = oracle.several(case, _STEPS)
        indexer = made(comm, case)
        inputs = [given(comm, step) for step in steps]
        want = [[torch.from_numpy(one).to(comm.device) for one in oracle.expected(step, comm.rank)] for step in steps]
        captured = Captured(comm, indexer, case)
        wrong = torch.zeros((), dtype=torch.int64, device=comm.device)
        for turn in range(1000):
            at = (turn * 5 + turn // _STEPS) % _STEPS
            for one, expected in zip(captured.replay(inputs[at]), want[at], strict=True):
                wrong += (one.view(torch.int32) != expected.view(torch.int32)).sum()
            if turn % 250 == 0:  # an eager step between
                packed = (lambda _, step=steps[at]: given(comm, step)) if case.width in FORMATS else None
                oracle.check(indexer, comm, steps[at], packed)
        assert wrong.item() == 0
        comm.check()

    run(case.world, body, patience=300.0, **case.options)


def test_a_replay_allocates_nothing():
    case = CASES[0]

    def body(comm):
        indexer = made(comm, case)
        captured = Captured(comm, indexer, case)
        inputs = given(comm, case)
        captured.replay(inputs)
        torch.cuda.synchronize()
        comm._session.world.barrier()  # ranks may share a device, and so its allocator
        before = torch.cuda.memory_allocated()
        comm._session.world.barrier()
        for _ in range(20):
            captured.replay(inputs)
        torch.cuda.synchronize()
        comm._session.world.barrier()
        assert torch.cuda.memory_allocated() == before
        assert np.array_equal(captured.found.ids.cpu().numpy(), oracle.expected(case, comm.rank)[1])
        comm._session.world.barrier()

    run(2, body, **case.options)
