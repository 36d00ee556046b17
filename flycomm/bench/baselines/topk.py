# SPDX-License-Identifier: Apache-2.0
"""``torch.topk``, alone and with an all-gather of every rank's candidates. Among equal scores it takes any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from flycomm.bench.baselines.distributed import OfGroup, all_gather
from flycomm.bench.contender import Contender, Context
from flycomm.bench.subjects.exchange import ExchangeInput
from flycomm.bench.subjects.topk import TopkInput

Pair = tuple[torch.Tensor, torch.Tensor]


class TorchTopk(Contender):
    name = "torch_topk"
    does: ClassVar = {"topk": (None,)}

    def prepare(self, context: Context, inputs: Sequence[TopkInput]) -> None:
        self._inputs = list(inputs)

    def call(self, index: int) -> Pair:
        scores, k = self._inputs[index]
        values, ids = torch.topk(scores, k, dim=1)
        return values, ids


class Gathered:
    """The best of what all ranks nominate: an all-gather of scores and one of ids, ``torch.topk``.

    ``shape``: (rows, candidates) of a rank, whose scores are in ``dtype``."""

    def __init__(self, context: Context, shape: tuple[int, int], dtype: torch.dtype):
        self._group, self._world = context.group, context.world.size
        rows, candidates = shape
        all_rows = self._world * rows, candidates
        self._values = torch.empty(all_rows, dtype=dtype, device=context.device)
        self._ids = torch.empty(all_rows, dtype=torch.int32, device=context.device)

    def best(self, values: torch.Tensor, ids: torch.Tensor, k: int) -> Pair:
        all_gather(self._values, values, group=self._group)
        all_gather(self._ids, ids, group=self._group)
        best, places = torch.topk(self._by_row(self._values), k, dim=1)
        return best, self._by_row(self._ids).gather(1, places)

    def _by_row(self, gathered: torch.Tensor) -> torch.Tensor:
        """(world * rows, candidates) as (rows, world * candidates)."""
        return gathered.unflatten(0, (self._world, -1)).transpose(0, 1).flatten(1)


class _GatherTopk(OfGroup):
    """A local top-k, an all-gather of scores and one of ids, a top-k of what came: every rank has every row, from
    which a mode would pick. Where the local best have been found, it begins with them, and with their global ids."""

    does: ClassVar = {"topk_exchange": (None,)}

    def prepare(self, context: Context, inputs: Sequence[ExchangeInput]) -> None:
        self._rank, self._world = context.world.rank, context.world.size
        self._inputs = list(inputs)
        self._ids = [None if one.ids is None else self._to_global(one.ids) for one in inputs]
        shape = len(inputs[0].scores), inputs[0].k
        self._gathered = Gathered(context, shape, inputs[0].scores.dtype)

    def call(self, index: int) -> Pair:
        scores, _, k, *_ = self._inputs[index]
        ids = self._ids[index]
        if ids is None:
            scores, local = torch.topk(scores, k, dim=1)
            ids = self._to_global(local.int())
        return self._gathered.best(scores, ids, k)

    def _to_global(self, local: torch.Tensor) -> torch.Tensor:
        return local * self._world + self._rank


class GlooGatherTopk(_GatherTopk):
    name = "gloo_gather_topk"
    target = "host"


class NcclGatherTopk(_GatherTopk):
    name = "nccl_gather_topk"
    target = "cuda"


class RcclGatherTopk(_GatherTopk):
    name = "rccl_gather_topk"
    target = "rocm"
