# SPDX-License-Identifier: Apache-2.0
"""An indexer's decode with no sharing, no exchange, and torch's exchange. All of them score by flycomm's kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from flycomm.bench.baselines.distributed import OfGroup
from flycomm.bench.baselines.topk import Gathered, Pair
from flycomm.bench.contender import Contender, Context, Result
from flycomm.bench.subjects.index_cache import IndexInput
from flycomm.bench.subjects.indexer import Calls
from flycomm.indexer import ShardLayout, TopK
from flycomm.indexer.nominate import Nominate, room_for

_DOES = {"indexer": (None,)}


class Replicated(Contender):
    """Every rank scores everything, and selects, by flycomm's top-k, what it needs."""

    name = "replicated"
    does: ClassVar = _DOES

    def prepare(self, context: Context, inputs: Sequence[IndexInput]) -> None:
        self._calls = Calls(context.comm, inputs, parallel=False)

    def call(self, index: int) -> Result:
        return self._calls.decode(index)


class ReplicatedScores(Replicated):
    """Its scores alone, nothing is selected: for the rate at which a cache is read."""

    name = "replicated_scores"

    def prepare(self, context: Context, inputs: Sequence[IndexInput]) -> None:
        super().prepare(context, inputs)
        shape = inputs[0].shape.lists, self._calls.columns
        self._scores = [torch.zeros(shape, device=context.device) for _ in inputs]

    def call(self, index: int) -> Result:
        self._calls.score(index, self._scores[index])
        return self._scores[index]


class NoExchange(Contender):
    """A rank's share scored, and the best of that: what context parallelism cannot be faster than. Ids are columns."""

    name = "no_exchange"
    does: ClassVar = _DOES

    def prepare(self, context: Context, inputs: Sequence[IndexInput]) -> None:
        shape = inputs[0].shape
        self._calls = Calls(context.comm, inputs, parallel=True)
        self._select = Nominate(context.comm._session, shape.lists, self._calls.columns, shape.indexer.k, True, True)
        self._found = [room_for(shape.lists, shape.indexer.k, context.device) for _ in inputs]
        self._of_share = torch.ones((), device=context.device)

    def call(self, index: int) -> tuple[torch.Tensor, ...]:
        plan = self._calls.plan
        scores = self._calls.indexer.selector.room(plan)
        self._calls.score(index, scores)
        found: TopK = self._select(scores, plan.share_lengths, self._found[index])
        return (*found, self._of_share)


class _CpTorch(OfGroup):
    """A rank's share scored, ``torch.topk``, an all-gather of scores and one of ids, ``torch.topk``: every rank has
    every list, whatever the mode. Where no key is, scores are -inf from the start; forced ones are set each time."""

    does: ClassVar = _DOES

    def prepare(self, context: Context, inputs: Sequence[IndexInput]) -> None:
        shape, device = inputs[0].shape, context.device
        indexer = shape.indexer
        self._calls = Calls(context.comm, inputs, parallel=True)
        columns = self._calls.columns
        self._scores = torch.full((shape.lists, columns), -torch.inf, device=device)
        self._k, self._most = indexer.k, min(indexer.k, columns)
        self._gathered = Gathered(context, (shape.lists, self._most), torch.float32)
        layout = ShardLayout(context.world.size, shape.page // indexer.block)
        self._ids = layout.to_global(torch.arange(columns, device=device), context.world.rank).int()
        lengths = -(-self._calls.plan.visible.repeat_interleave(indexer.lists)[:, None] // indexer.block)
        first, last = indexer.forced
        forced = (self._ids < first) | ((self._ids >= lengths - last) & (self._ids < lengths))
        self._forced = forced.flatten().nonzero().flatten()

    def call(self, index: int) -> Pair:
        self._calls.score(index, self._scores)
        if len(self._forced):
            self._scores.view(-1).index_fill_(0, self._forced, torch.inf)
        values, columns = torch.topk(self._scores, self._most, dim=1, sorted=False)
        return self._gathered.best(values, self._ids[columns], self._k)


class CpGlooTorch(_CpTorch):
    name = "cp_gloo_torch"
    target = "host"


class CpNcclTorch(_CpTorch):
    name = "cp_nccl_torch"
    target = "cuda"


class CpRcclTorch(_CpTorch):
    name = "cp_rccl_torch"
    target = "rocm"
