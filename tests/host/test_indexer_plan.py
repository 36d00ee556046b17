# SPDX-License-Identifier: Apache-2.0
"""A step's plan against plain Python: what rows see, whose it is, and where it lies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from flycomm.errors import DisagreementError
from flycomm.indexer.cp import IndexerCP, owners_of
from flycomm.indexer.kinds import BLOCK_MAX, DSA
from flycomm.indexer.shard import ShardLayout
from tests import indexer_oracle as oracle
from tests.indexer_oracle import Case
from tests.ranks import run

BLOCKS = replace(BLOCK_MAX, forced=(2, 1))
LENS = (300, 0, 1, 129, 128, 700, 3)
QUERIES = (2, 0, 4, 1, 8, 1, 3)


def plan_of(comm, case, indexer):
    x = oracle.inputs(comm, replace(case, seq_lens=tuple(min(one, case.most) for one in case.seq_lens)))
    lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=comm.device)
    uniform = len(set(case.queries)) == 1
    plan = indexer.plan(lens, case.queries[0] if uniform else x["ends"], case.rows)
    return {name: one.cpu().numpy() if isinstance(one, torch.Tensor) else one for name, one in vars(plan).items()}


def check_plan(comm, cases):
    indexer = oracle.made(comm, cases[0])
    for case in cases:
        rows, lists, block = case.rows, case.indexer.lists, case.indexer.block
        plan, layout = plan_of(comm, case, indexer), case.layout
        capped = replace(case, seq_lens=tuple(min(one, case.most) for one in case.seq_lens))
        if capped == case:
            seen = oracle.visible(case)
            assert plan["visible"].tolist() == seen.tolist()
        seen = plan["visible"]
        assert plan["request_of_row"].tolist() == oracle.request_of_row(case).tolist()
        if plan["alone"]:
            layout = ShardLayout(1, case.page)
        rank = 0 if plan["alone"] else comm.rank
        share = [layout.local_length(int(one), rank) for one in seen]
        assert plan["share"].tolist() == share
        keys = np.repeat(-(-seen // block), lists)
        assert plan["lengths"].tolist() == keys.tolist()
        mine = np.repeat([-(-one // block) for one in share], lists)
        if plan["alone"] and case.mode == "owner":
            mine *= owners_of(case.indexer, rows, case.world).numpy() == comm.rank
        assert plan["share_lengths"].tolist() == mine.tolist()
        assert plan["row_count"].tolist() == list(case.queries)
        assert plan["first_row"].tolist() == [sum(case.queries[:i]) for i in range(len(case.queries))]
        pages = [-(-layout.local_length(min(one, case.most), rank) // case.page) for one in case.seq_lens]
        assert plan["pages"].tolist() == pages
        if plan["pinned"] is not None:
            first, last = case.indexer.forced
            for places, count in zip(plan["pinned"], keys, strict=True):
                want = {*range(min(first, count)), *range(max(0, count - last), count)} or {0}
                assert set(places.tolist()) == want


@pytest.mark.parametrize(
    "case",
    [
        Case(world=3, granule=1, seq_lens=LENS, queries=QUERIES, padding=5, most=700),
        Case(world=2, granule=64, seq_lens=(100, 64, 4), queries=(4, 4, 4), padding=0),
        Case(world=2, granule=64, seq_lens=(513, 1000000, 5), queries=(2, 2, 2), padding=90),  # longer than may be
        Case(world=2, indexer=BLOCKS, granule=128, page=128, seq_lens=LENS, queries=QUERIES, padding=1, most=768),
        Case(world=3, indexer=BLOCKS, granule=0, page=128, cache="replicated", mode="owner", parallel=False),
    ],
    ids=["ragged", "uniform", "over capacity", "blocks", "alone"],
)
def test_what_rows_see(case):
    run(case.world, check_plan, [case, *oracle.several(case, 3)], **case.options)


def test_rows_beyond_those_of_the_step_are_nobodys():
    """A graph has rows for so many: what ``queries`` say beyond is cut, and no kernel writes there."""

    def body(comm):
        indexer = oracle.made(comm, Case(world=1))
        lens, ends = (torch.tensor(x, dtype=torch.int32, device=comm.device) for x in ((9, 9, 9), (0, 3, 7, 9)))
        plan = indexer.plan(lens, ends, rows=5)
        assert plan.visible.tolist() == [7, 8, 9, 6, 7]
        assert (plan.first_row.tolist(), plan.row_count.tolist()) == ([0, 3, 5], [3, 2, 0])

    run(1, body, **Case().options)


def test_no_request_and_no_row():
    def body(comm):
        indexer = oracle.made(comm, Case(padding=4))
        none = torch.zeros(0, dtype=torch.int32, device=comm.device)
        empty = indexer.plan(none, 3)
        padded = indexer.plan(none, torch.zeros(1, dtype=torch.int32, device=comm.device), rows=4)
        for plan in (empty, padded):
            assert not plan.visible.any()
            assert not plan.share_lengths.any()
        table = torch.zeros(0, 1, dtype=torch.int32, device=comm.device)
        q = torch.zeros(4, 2, 4, device=comm.device)
        assert indexer.decode(q[:0], None, None, table, empty).ids.shape == (0, 24)
        assert indexer.decode(q, None, None, table, padded).ids.tolist() == [[-1] * 24] * 4

    run(2, body, **Case().options)


@pytest.mark.parametrize(
    ("case", "places"),
    [
        (Case(world=3, cache="replicated"), [(0, 3), (1, 3), (2, 3)]),
        (Case(world=2, cache="replicated", granule=0), [(0, 1), (4, 1)]),
        (Case(world=2, cache="replicated", granule=1, parallel=None), None),
        (Case(world=2, granule=1), [(0, 1), (0, 1)]),
        (Case(world=2, cache="replicated", parallel=False), [(0, 1), (0, 1)]),
    ],
    ids=["pages in turn", "one run", "tokens in turn", "own pages", "alone"],
)
def test_where_the_pages_of_a_share_are(case, places):
    def body(comm):
        if places is None:
            with pytest.raises(ValueError, match=r"not a page of 64, .* use ShardLayout\(2, 64\)"):
                oracle.made(comm, case)
            return
        plan = plan_of(comm, case, oracle.made(comm, case))
        assert (plan["page_first"], plan["page_step"]) == places[comm.rank]

    run(case.world, body, **case.options)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cache": "copied"}, "cache='copied' is not one of sharded, replicated"),
        ({"mode": "some"}, "mode='some' is not one of"),
        ({"layout": ShardLayout(3)}, "over 3 ranks, the communicator over 2"),
        ({"rows": 0}, "0 rows, pages of 64"),
        ({"indexer": BLOCK_MAX}, "pages of 64 tokens dealt out by 64 cut keys of 128"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(change, says):
    def body(comm):
        arguments = {"indexer": DSA, "layout": ShardLayout(2, 64), "rows": 4, "max_tokens": 100, "page": 64}
        arguments |= {"scorer": print} | change
        with pytest.raises(ValueError, match=says):
            IndexerCP(comm, arguments.pop("indexer"), arguments.pop("layout"), **arguments)

    run(2, body)


def test_a_step_that_cannot_be_is_refused():
    def body(comm):
        indexer = oracle.made(comm, Case(world=1, padding=0))  # 8 rows
        lens = torch.zeros(3, dtype=torch.int32, device=comm.device)
        for arguments, says in (
            ((lens, 3), "9 query rows are not within the 8"),
            ((lens, 2, 5), "3 requests of 2 query rows are not within 5 rows"),
            ((lens.long(), 2), "seq_lens are"),
            ((lens, lens), r"queries are \(3,\)"),
        ):
            with pytest.raises(ValueError, match=says):
                indexer.plan(*arguments)
        plan = indexer.plan(lens, 2)
        with pytest.raises(ValueError, match="block table is of 2 requests, the plan of 3"):
            indexer.decode(None, None, None, torch.zeros(2, 1), plan)

    run(1, body, **Case().options)


def test_other_arguments_on_another_rank_are_told():
    def body(comm):
        with pytest.raises(DisagreementError, match="ranks differ in"):
            oracle.made(comm, Case(order="index" if comm.rank else "score"))

    run(2, body, **Case().options)
