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


class _GatherTopk(OfGroup):
    """A local top-k, an all-gather of scores and one of ids, a top-k of what came: every rank has every row, from
    which a mode would pick."""

    does: ClassVar = {"topk_exchange": (None,)}

    def prepare(self, context: Context, inputs: Sequence[ExchangeInput]) -> None:
        self._group, self._rank, self._world = context.group, context.world.rank, context.world.size
        self._inputs = list(inputs)
        shape = (self._world * len(inputs[0].scores), inputs[0].k)
        self._values = torch.empty(shape, dtype=inputs[0].scores.dtype, device=context.device)
        self._ids = torch.empty(shape, dtype=torch.int32, device=context.device)

    def call(self, index: int) -> Pair:
        scores, _, k, *_ = self._inputs[index]
        values, local = torch.topk(scores, k, dim=1)
        all_gather(self._values, values, group=self._group)
        all_gather(self._ids, local.int() * self._world + self._rank, group=self._group)
        best, places = torch.topk(self._by_row(self._values), k, dim=1)
        return best, self._by_row(self._ids).gather(1, places)

    def _by_row(self, gathered: torch.Tensor) -> torch.Tensor:
        """(world * rows, k) as (rows, world * k)."""
        return gathered.unflatten(0, (self._world, -1)).transpose(0, 1).flatten(1)


class GlooGatherTopk(_GatherTopk):
    name = "gloo_gather_topk"
    target = "host"


class NcclGatherTopk(_GatherTopk):
    name = "nccl_gather_topk"
    target = "cuda"


class RcclGatherTopk(_GatherTopk):
    name = "rccl_gather_topk"
    target = "rocm"
