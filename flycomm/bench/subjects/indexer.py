# SPDX-License-Identifier: Apache-2.0
"""An indexer's decode over ranks that share the scoring: flycomm's call, its inputs, and what must come out.

Every rank has the whole cache and reads its share, dealt out by pages. The plan is made once, outside of what is timed,
as once a step. Four layers' caches take turns. Where four shares would stay in a GPU's caches, each token is several
times in memory, and calls go to other copies: up to 16 of them, so that memory stays bounded; a replay of 50 calls
then reads 50 different ones. Scores of kernels are rounded in their own way: see ``selection``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, ClassVar

import torch

import flycomm
from flycomm.bench.contender import Contender, Context
from flycomm.bench.problem import BUFFERS, Case
from flycomm.bench.reference import Verdict, worst
from flycomm.bench.subjects import exchange
from flycomm.bench.subjects.index_cache import IndexInput, Shape, make
from flycomm.bench.subjects.index_reference import all_scores
from flycomm.bench.subjects.selection import Among, same_bits
from flycomm.indexer import IndexerCP, IndexScores, ShardLayout, TopK
from flycomm.indexer.cp import owners_of
from flycomm.primitives.index_score import DEVIATION

_MAX_BYTES = 64 << 20
_COLD_BYTES = 512 << 20  # read before a byte is read again: twice the largest cache of today's GPUs
_MOST_COPIES = 16


class Calls:
    """One step on one rank: its indexer, and a call for each buffer. ``parallel``: whether ranks share the scoring.

    Collective to make.
    """

    def __init__(self, comm: Any, inputs: Sequence[IndexInput], parallel: bool):
        shape = inputs[0].shape
        self.scorer = IndexScores(comm, shape.indexer, shape.format, shape.heads, shape.page, scale=shape.scale)
        self.indexer = IndexerCP(
            comm,
            shape.indexer,
            ShardLayout(comm.world_size, shape.page),
            rows=shape.rows,
            max_tokens=shape.context,
            page=shape.page,
            scorer=self.scorer,
            cache="replicated",
            mode=shape.mode,
            parallel=parallel,
        )
        lengths = torch.full((shape.requests,), shape.context, dtype=torch.int32, device=comm.device)
        self.plan = self.indexer.plan(lengths, shape.query_rows)
        self.columns = self.indexer.selector.columns[self.plan.alone]
        self._inputs = [(one.q, one.weights, one.cache) for one in inputs]
        self._tables = [cycle(one.tables) for one in inputs]

    def decode(self, index: int) -> TopK:
        return self.indexer.decode(*self._inputs[index], next(self._tables[index]), self.plan)

    def score(self, index: int, out: torch.Tensor) -> None:
        """Only the scores, into f32 (lists, columns)."""
        self.scorer(*self._inputs[index], next(self._tables[index]), self.plan, out)


class IndexerProblem:
    """Inputs on the device; all scores by torch, and what one rank selects that scores everything, one a buffer."""

    def __init__(self, context: Context, case: Case):
        shape, world = Shape.of(case), context.world
        copies = 1
        if context.device.type != "cpu":
            copies = min(_MOST_COPIES, -(-_COLD_BYTES // (BUFFERS * shape.share_bytes(world.size))))
        self.inputs = [make(shape, buffer, copies, context.device) for buffer in range(BUFFERS)]
        alone = Calls(context.comm, self.inputs, parallel=False)
        off = DEVIATION[alone.scorer.asked.math]
        self._among = [Among(scores, off * most) for scores, most in map(all_scores, self.inputs)]
        self._alone = [alone.decode(index) for index in range(BUFFERS)]
        indexer, ends = shape.indexer, self._among[0].seen[:, None]
        first, last = indexer.forced
        keys = torch.arange(self._among[0].scores.shape[1], device=context.device)
        self._forced = torch.cat([keys[:first].expand(len(ends), -1), ends - 1 - keys[:last]], dim=1)
        self._layout = ShardLayout(world.size, shape.page // indexer.block)
        self._rank, self._own = world.rank, keys // self._layout.granule % world.size == world.rank
        owners = owners_of(indexer, shape.rows, world.size).to(context.device)
        self._needed = owners == world.rank if shape.mode == "owner" else torch.ones_like(owners, dtype=torch.bool)

    def judge(self, results: dict[int, Any], exact: bool) -> Verdict:
        """Of a baseline only the lists that this rank needs are looked at. It may also be all scores, one tensor; or,
        of no exchange, four: scores, columns and counts of this rank's share alone, and one that says so."""
        return worst([self._judge(index, found, exact) for index, found in results.items()])

    def _judge(self, index: int, found: Any, exact: bool) -> Verdict:
        among = self._among[index]
        if isinstance(found, torch.Tensor):
            return among.judge_all(found)
        scores, ids = found[:2]
        if len(found) == 4:
            share = among.within(self._own)
            count = int(share.seen.min())  # a short share has less than k
            return share.judge(scores[:, :count], self._layout.to_global(ids[:, :count].long(), self._rank))
        mine = self._needed
        verdict = among.forcing(self._forced).lists(mine).judge(scores[mine], ids[mine])
        same = not exact or same_bits(found, self._alone[index])
        return Verdict(verdict.correct and same, verdict.max_error)


class FlycommIndexer(Contender):
    """With a communicator of its own, which has the channels of just this exchange."""

    name = "flycomm"
    does: ClassVar = {"indexer": (None,)}

    def prepare(self, context: Context, inputs: Sequence[IndexInput]) -> None:
        shape = inputs[0].shape
        self._comm = flycomm.init(
            context.group,
            world=context.world,
            target=context.target.name,
            name=f"{context.comm.group_name} indexer",
            max_bytes=_MAX_BYTES,
            timeout=context.timeout,
            fallback="error",
            topk=(shape.lists, shape.indexer.k),
        )
        self._calls = Calls(self._comm, inputs, parallel=True)

    def call(self, index: int) -> tuple[torch.Tensor, ...]:
        return self._calls.decode(index)

    def release(self, context: Context) -> None:
        del self._calls
        self._comm.close()


def protocol(context: Context, case: Case, captured: bool) -> str:
    """The exchange's; "alone" where there is none."""
    if context.world.size == 1:
        return "alone"
    shape = Shape.of(case)
    exchanged = replace(case, rows=shape.lists, k=shape.indexer.k, exchange_mode=shape.mode)
    return exchange.protocol(context, exchanged, captured)


def share_bytes(case: Case, world: int) -> int:
    """Of the cache that a rank reads in a call: what bounds the scores of few rows."""
    return Shape.of(case).share_bytes(world)
