# SPDX-License-Identifier: Apache-2.0
"""Context parallelism of an indexer against one rank that scores everything: the same ids on every rank, exactly."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from flycomm import tables, targets
from flycomm.indexer.kinds import DSA
from flycomm.tables.crossovers import Crossover
from tests import indexer_oracle as oracle
from tests.indexer_oracle import BLOCKS, TOKENS, Case
from tests.model.verdict import name
from tests.ranks import run, same_bits

MANY = replace(DSA, k=600)
LENS = (700, 0, 1, 129, 128, 513)  # of 64 or 128 tokens dealt out, some ranks have none of the shorter ones
QUERIES = (2, 1, 4, 1, 0, 3)

# Every two values of two parameters meet, or nearly.
PAIRWISE = [
    Case(world=1, indexer=TOKENS, granule=64, mode="owner", order="index"),
    Case(world=1, indexer=BLOCKS, page=128, granule=128, cache="replicated", whole=False),
    Case(world=2, indexer=TOKENS, granule=1, mode="all", whole=False, tie_break="high"),
    Case(
        world=2, indexer=MANY, granule=64, cache="replicated", mode="owner", seq_lens=LENS, queries=QUERIES, most=3000
    ),
    Case(world=2, indexer=BLOCKS, granule=256, page=128, mode="shard", seq_lens=LENS, queries=QUERIES, most=768),
    Case(world=3, indexer=BLOCKS, granule=0, page=128, cache="replicated", mode="owner", order="index"),
    Case(world=3, indexer=TOKENS, granule=1, mode="shard", tie_break="high", seq_lens=(3900, 20, 65, 3000), most=4000),
    Case(world=3, indexer=TOKENS, granule=128, page=64, mode="shard", order="index", whole=False),
    Case(world=3, indexer=TOKENS, granule=0, cache="replicated", seq_lens=(200, 65, 3, 64)),
    Case(world=4, indexer=BLOCKS, granule=128, page=128, cache="replicated", tie_break="high"),
    Case(world=4, indexer=TOKENS, granule=64, seq_lens=(1, 1, 5, 40), queries=(1, 1, 2, 8), padding=0),
]
WIDE = [
    Case(world=8, indexer=TOKENS, granule=1, topk_rows=4, seq_lens=LENS, queries=QUERIES, most=700),
    Case(world=8, indexer=BLOCKS, granule=128, page=128, mode="owner", topk_rows=4, most=1024),
    Case(world=8, indexer=MANY, granule=64, cache="replicated", mode="shard", most=9000, seq_lens=(8999, 6000, 9, 0)),
    Case(world=3, indexer=replace(DSA, k=2048), granule=1, most=16000, seq_lens=(15999, 2048), queries=(4, 2)),
    Case(world=2, indexer=replace(DSA, k=512), granule=128, most=6000, seq_lens=(5999, 513), queries=(8, 8), padding=0),
    Case(world=3, indexer=replace(DSA, k=512), mode="owner", most=15000, seq_lens=(14999, 513, 7), queries=(8, 8, 8)),
    Case(
        world=2, indexer=replace(BLOCKS, k=16), granule=128, page=128, most=9088, seq_lens=(8999, 4000), queries=(8, 4)
    ),
]


@pytest.mark.parametrize("case", [*PAIRWISE, *(pytest.param(case, marks=pytest.mark.full) for case in WIDE)], ids=name)
def test_equals_one_rank_that_scores_everything(case: Case):
    run(case.world, oracle.check_all, oracle.several(case, 3), **case.options)


@pytest.mark.full
@pytest.mark.parametrize("cache", ["sharded", "replicated"])
@pytest.mark.parametrize("indexer", [TOKENS, BLOCKS], ids=["dsa", "block_max"])
@pytest.mark.parametrize("mode", ["all", "shard", "owner"])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_every_mode_and_cache(world, mode, indexer, cache):
    page = 64 * 2 if indexer.block > 1 else 64
    case = Case(world=world, indexer=indexer, granule=page, page=page, cache=cache, mode=mode, topk_rows=8)
    run(world, oracle.check_all, oracle.several(case, 4), **case.options)


@pytest.mark.parametrize(
    "case",
    [
        Case(world=2, indexer=TOKENS, cache="replicated", mode="owner", order="index", parallel=None),
        Case(world=3, indexer=BLOCKS, granule=128, page=128, cache="replicated", mode="owner", parallel=None),
    ],
    ids=["dsa", "block_max"],
)
def test_with_and_without_the_exchange_the_bits_are_the_same(case):
    def body(comm):
        parts = []
        for parallel in (True, False):
            one = replace(case, parallel=parallel)
            indexer = oracle.made(comm, one)
            assert indexer.applies(1 << 20, 1) == parallel
            parts.append([oracle.check(indexer, comm, again) for again in oracle.several(one, 3)])
        for shared, alone in zip(*parts, strict=True):
            for one, other in zip(shared, alone, strict=True):
                assert np.array_equal(one.view(np.uint32), other.view(np.uint32))

    run(case.world, body, **case.options)


def test_the_context_of_a_step_chooses(tmp_path):
    """By the agreed table, from 256 tokens on; the ids are those of the other way."""
    arch = targets.active().capabilities(0).arch
    table = replace(tables.shipped(arch), arch=arch, indexer=(Crossover("dsa", (1, 8), None, 256, "measured"),))
    path = tmp_path / "table.json"
    path.write_text(table.to_json())
    case = Case(cache="replicated", seq_lens=(255, 30, 0, 130), parallel=None)

    def body(comm):
        indexer = oracle.made(comm, case)
        x = oracle.inputs(comm, case)
        found = []
        for context, alone in ((255, True), (256, False), (None, False)):
            plan = indexer.plan(x["seq_lens"], x["ends"], case.rows, context)
            assert plan.alone == alone
            found.append(indexer.decode(x["q"], x["weights"], x["cache"], x["table"], plan))
        for one in found[1:]:
            assert all(same_bits(left, right) for left, right in zip(one, found[0], strict=True))
        assert np.array_equal(found[0].ids.cpu().numpy(), oracle.expected(case, comm.rank)[1])

    run(2, body, table=path, **case.options)


def test_more_lists_than_are_pushed():
    """8 rows of 4 lists, where the communicator was made for 12."""
    case = Case(world=3, indexer=BLOCKS, granule=128, page=128, mode="owner", padding=0, topk_rows=12)
    run(3, oracle.check_all, oracle.several(case, 2), **case.options)


def test_a_forced_block_with_the_lowest_score():
    """Blocks score by their best token: the last one, of one token, is the lowest of many."""
    forced = replace(BLOCKS, k=2, forced=(1, 1))
    for parallel in (True, False):
        case = Case(world=2, indexer=forced, granule=128, page=128, cache="replicated", parallel=parallel)
        case = replace(case, seq_lens=(385, 257, 1, 0), queries=(1, 1, 1, 1), padding=0)

        def body(comm, case=case):
            _, ids, counts = oracle.check(oracle.made(comm, case), comm, case)
            assert ids[:4].tolist() == [[0, 3]] * 4
            assert ids[8:12].tolist() == [[0, -1]] * 4
            assert counts[::4].tolist() == [2, 2, 1, 0]

        run(2, body, **case.options)


def _forget(comm, steps):
    """Steps of one indexer, a rank late from time to time."""
    indexer = oracle.made(comm, steps[0])
    for turn, case in enumerate(steps):
        if turn % 7 == 0 and comm.rank == turn % comm.world_size:
            time.sleep(0.003)
        oracle.check(indexer, comm, case)


@pytest.mark.parametrize("mode", ["all", "owner"])
def test_many_steps_with_other_lengths_and_tables(mode):
    case = Case(world=3, mode=mode, seq_lens=(400, 90, 0, 200))
    run(3, _forget, oracle.several(case, 25), **case.options)


def _attention(case, ids, keys):
    """Of each row, over the keys that it kept, in the order in which it got them: (rows, width)."""
    q = torch.from_numpy(oracle._numbers(case)[0])[:, 0]
    of = torch.from_numpy(oracle.request_of_row(case))
    out = torch.zeros_like(q)
    for row in range(q.shape[0]):
        kept = keys[of[row], torch.from_numpy(ids[row][ids[row] >= 0].astype(np.int64))]
        out[row] = torch.softmax(kept @ q[row], 0) @ kept
    return out


@pytest.mark.parametrize("order", ["score", "index"])
def test_attention_over_the_selection_has_the_same_bits(order):
    case = Case(world=2, granule=64, cache="replicated", order=order, whole=False)
    keys = torch.from_numpy(oracle._numbers(case)[2])

    def body(comm):
        outs = []
        for parallel in (True, False):
            one = replace(case, parallel=parallel)
            outs.append(_attention(case, oracle.call(oracle.made(comm, one), comm, one)[1], keys))
        assert same_bits(*outs)
        assert outs[0].abs().sum() > 0
        return outs[0]

    left, right = run(2, body, **case.options)
    assert same_bits(left, right)


def test_one_rank_gives_the_bits_of_many():
    case = Case(world=1, granule=64, cache="replicated", whole=False)
    (alone,) = run(1, lambda comm: oracle.call(oracle.made(comm, case), comm, case), **case.options)
    many = replace(case, world=4)
    for found in run(4, lambda comm: oracle.call(oracle.made(comm, many), comm, many), **many.options):
        assert all(
            np.array_equal(one.view(np.uint32), same.view(np.uint32)) for one, same in zip(found, alone, strict=True)
        )


def test_without_channels_it_says_how_to_have_them():
    def body(comm):
        with pytest.raises(ValueError, match=r"pass topk=\(\d+, 24\) to init"):
            oracle.call(oracle.made(comm, Case()), comm, Case())

    run(2, body)
