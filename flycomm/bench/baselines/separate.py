# SPDX-License-Identifier: Apache-2.0
"""All-reduce, residual and RMSNorm one after the other: an all-reduce, then torch's own two kernels.

The group's all-reduce is in place: values grow with every timed call, which costs no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from flycomm.bench.baselines.distributed import OfGroup
from flycomm.bench.baselines.flashinfer import comm_module, missing
from flycomm.bench.contender import Contender, Context
from flycomm.bench.subjects.norm import EPS, NormInput

Pair = tuple[torch.Tensor, torch.Tensor]


class _Separate(OfGroup):
    does: ClassVar = {"all_reduce_norm": (None,)}
    in_place = True

    def prepare(self, context: Context, inputs: Sequence[NormInput]) -> None:
        self._group, self._norm = context.group, self._step()
        self._inputs = [one._replace(x=one.x.clone()) for one in inputs]

    def call(self, index: int) -> Pair:
        x, residual, weight = self._inputs[index]
        dist.all_reduce(x, group=self._group)
        return self._norm(x, residual, weight)

    def _step(self) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Pair]:
        """What follows the all-reduce."""
        return norm


class GlooSeparate(_Separate):
    name = "gloo_separate"
    target = "host"


class NcclSeparate(_Separate):
    name = "nccl_separate"
    target = "cuda"


class NcclCompiled(NcclSeparate):
    """With residual and RMSNorm in one kernel of torch.compile."""

    name = "nccl_compiled"

    def _step(self) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Pair]:
        return torch.compile(norm, dynamic=False)


class RcclSeparate(_Separate):
    name = "rccl_separate"
    target = "rocm"


class FlycommSeparate(Contender):
    """The same after flycomm's own all-reduce: what the one kernel saves."""

    name = "flycomm_separate"
    does: ClassVar = {"all_reduce_norm": (None,)}

    def prepare(self, context: Context, inputs: Sequence[NormInput]) -> None:
        self._comm = context.comm
        self._inputs = list(inputs)
        self._sums = [torch.empty_like(one.x) for one in inputs]
        context.comm.prepare([inputs[0].x.dtype], [inputs[0].x.nbytes])

    def call(self, index: int) -> Pair:
        x, residual, weight = self._inputs[index]
        return norm(self._comm.all_reduce(x, out=self._sums[index]), residual, weight)


class FlashInferFused(Contender):
    """TensorRT-LLM's one-shot kernel with residual and RMSNorm, f32 sums, from the FlashInfer wheel."""

    name = "flashinfer_fused"
    does: ClassVar = {"all_reduce_norm": (None,)}

    def __init__(self, pdl: bool = False):
        self._pdl = pdl

    def available(self, context: Context) -> str | None:
        return missing(context)

    def prepare(self, context: Context, inputs: Sequence[NormInput]) -> None:
        comm = comm_module()
        self._all_reduce: Any = comm.allreduce_fusion
        self._pattern = comm.AllReduceFusionPattern.kARResidualRMSNorm
        self._inputs = list(inputs)
        self._outputs = [(torch.empty_like(one.x), torch.empty_like(one.x)) for one in inputs]
        rows, hidden = inputs[0].x.shape
        self._workspace = comm.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=context.world.size,
            rank=context.world.rank,
            max_token_num=rows,
            hidden_dim=hidden,
            dtype=inputs[0].x.dtype,
            group=context.group,
        )

    def call(self, index: int) -> Pair:
        x, residual, weight = self._inputs[index]
        normed, residual_out = self._outputs[index]
        self._all_reduce(
            input=x,
            workspace=self._workspace,
            pattern=self._pattern,
            launch_with_pdl=self._pdl,
            residual_in=residual,
            residual_out=residual_out,
            norm_out=normed,
            rms_gamma=weight,
            rms_eps=EPS,
            use_oneshot=True,
            fp32_acc=True,
        )
        return normed, residual_out

    def release(self, context: Context) -> None:
        self._workspace.destroy()


def norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Pair:
    added = x + residual
    return F.rms_norm(added, weight.shape, weight, EPS), added
