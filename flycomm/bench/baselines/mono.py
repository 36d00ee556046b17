# SPDX-License-Identifier: Apache-2.0
"""The feed-forward layer by separate kernels: torch's own, cuBLAS or hipBLAS among them, around the all-reduce."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from flycomm.bench.baselines.distributed import OfGroup
from flycomm.bench.contender import Contender, Context
from flycomm.bench.subjects.mono import EPS, MonoInput

Pair = tuple[torch.Tensor, torch.Tensor]


class _Layer(Contender):
    does: ClassVar = {"mono_ffn": (None,)}

    def prepare(self, context: Context, inputs: Sequence[MonoInput]) -> None:
        self._context = context
        self._inputs = list(inputs)

    def call(self, index: int) -> Pair:
        one = self._inputs[index]
        gate, up = F.linear(one.x, one.gate_up).chunk(2, dim=1)
        normed, residual = self._reduce(F.linear(F.silu(gate) * up, one.down), one)
        return F.linear(normed, one.projection), residual

    @abstractmethod
    def _reduce(self, partial: torch.Tensor, one: MonoInput) -> Pair:
        """All-reduce, residual, RMSNorm."""


class _OfGroup(_Layer, OfGroup):
    def _reduce(self, partial: torch.Tensor, one: MonoInput) -> Pair:
        dist.all_reduce(partial, group=self._context.group)
        residual = partial + one.residual
        return F.rms_norm(residual, one.norm_weight.shape, one.norm_weight, EPS), residual


class SeparateGloo(_OfGroup):
    name = "separate_gloo"
    target = "host"


class SeparateNccl(_OfGroup):
    name = "separate_nccl"
    target = "cuda"


class SeparateRccl(_OfGroup):
    name = "separate_rccl"
    target = "rocm"


class SeparateFlycomm(_Layer):
    """With flycomm's fused all-reduce, residual and norm."""

    name = "separate_flycomm"

    def prepare(self, context: Context, inputs: Sequence[MonoInput]) -> None:
        super().prepare(context, inputs)
        context.comm.prepare([inputs[0].x.dtype], [inputs[0].x.nbytes])  # of the separate all-reduce

    def _reduce(self, partial: torch.Tensor, one: MonoInput) -> Pair:
        normed, residual = self._context.comm.all_reduce_rms_norm(partial, one.residual, one.norm_weight, EPS)
        return normed, residual
