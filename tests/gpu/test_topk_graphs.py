# SPDX-License-Identifier: Apache-2.0
"""A captured top-k exchange: replayed with other scores, lengths and owners, with eager calls between, one node."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flycomm.indexer.shard import ShardLayout
from tests import topk_oracle as oracle
from tests.gpu.test_norm_graphs import Captured, nodes
from tests.ranks import run

ROWS, KEYS = 5, 300


def _scores(turn: int) -> np.ndarray:
    return oracle.scores(oracle.KINDS[turn % len(oracle.KINDS)], ROWS, KEYS, turn)


def _check(comm, turn, found, lengths, k):
    best, ids, counts = oracle.topk(_scores(turn), k, lengths)
    for name, one, want in zip(("scores", "ids", "counts"), found, (best, ids, counts), strict=True):
        got = one.cpu().numpy()
        assert np.array_equal(got.view(np.uint32), want.view(np.uint32)), (comm.rank, turn, name)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("algo", "k"), [("push", 16), ("push", 100), ("split", 100), ("radix", 16), ("radix", 100)])
def test_replays_with_other_scores_and_lengths(world, algo, k):
    pytest.importorskip("cuda.bindings", reason="counting the nodes of a graph needs cuda-bindings")

    def body(comm):
        layout, rng = ShardLayout(comm.world_size), np.random.default_rng(5)
        mine = [layout.to_global(i, comm.rank) for i in range(layout.local_length(KEYS, comm.rank))]
        x = torch.zeros(ROWS, len(mine), device=comm.device)
        lengths = torch.zeros(ROWS, dtype=torch.int32, device=comm.device)

        def call():
            return comm.topk_exchange(x, lengths, k, algo=algo)

        def set_up(turn):
            seen = rng.integers(0, KEYS + 1, ROWS)
            x.copy_(torch.from_numpy(_scores(turn)[:, mine]))
            lengths.copy_(torch.from_numpy(seen.astype(np.int32)))
            return seen

        captured = Captured(SimpleNamespace(comm=comm), call)
        assert nodes(captured.graph) == 1
        for turn in range(60):
            seen = set_up(turn)
            captured.graph.replay()
            _check(comm, turn, captured.outputs, seen, k)
            if turn % 3 == 0:
                _check(comm, turn, call(), seen, k)
        comm.check()

    run(world, body, topk=(4 if algo == "radix" else 8, k), max_bytes=16 << 20)
