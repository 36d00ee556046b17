# SPDX-License-Identifier: Apache-2.0
"""The weighted sum of a row's experts as one batched product of torch's, and then the all-reduce and the norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist

from flycomm.bench.baselines.distributed import OfGroup
from flycomm.bench.baselines.separate import Pair, norm
from flycomm.bench.contender import Contender, Context
from flycomm.bench.subjects.experts import NAME, ExpertInput
from flycomm.bench.subjects.norm import EPS


def _sum(one: ExpertInput) -> torch.Tensor:
    return torch.bmm(one.factors.unsqueeze(1), one.out).squeeze(1)


class _Experts(OfGroup):
    does: ClassVar = {NAME: (None,)}

    def prepare(self, context: Context, inputs: Sequence[ExpertInput]) -> None:
        self._group = context.group
        self._inputs = list(inputs)

    def call(self, index: int) -> Pair:
        one = self._inputs[index]
        total = _sum(one)
        dist.all_reduce(total, group=self._group)
        return norm(total, one.residual, one.weight)


class GlooExperts(_Experts):
    name = "gloo_experts"
    target = "host"


class NcclExperts(_Experts):
    name = "nccl_experts"
    target = "cuda"


class RcclExperts(_Experts):
    name = "rccl_experts"
    target = "rocm"


class FlycommApart(Contender):
    """The product, and flycomm's fused norm: what summing in its kernel saves."""

    name = "flycomm_apart"
    does: ClassVar = {NAME: (None,)}

    def prepare(self, context: Context, inputs: Sequence[ExpertInput]) -> None:
        self._comm = context.comm
        self._inputs = list(inputs)

    def call(self, index: int) -> Pair:
        one = self._inputs[index]
        return self._comm.all_reduce_rms_norm(_sum(one), one.residual, one.weight, EPS)
