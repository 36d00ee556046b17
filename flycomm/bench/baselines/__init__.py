# SPDX-License-Identifier: Apache-2.0
"""What flycomm is compared with, by name.

===================== ==========================================================================================
gloo                  torch.distributed on CPU tensors
nccl, rccl            torch.distributed on GPU tensors
nccl_window           the same on buffers registered as symmetric windows, where torch can register them
torch_one_shot,       ``torch.ops.symm_mem``, inputs already in symmetric memory: all-reduce
torch_two_shot
torch_reduce_scatter  the same, reduce-scatter
torch_low_contention  the same with copy engines: all-gather, reduce-scatter
flashinfer_one_shot   TensorRT-LLM's one-shot kernel from the FlashInfer wheel, f32 sums, the better of PDL on and off
vllm                  vLLM's custom all-reduce from the same wheel, registered buffers in graphs
gloo_separate, nccl_… all-reduce + residual + RMSNorm: torch.distributed's all-reduce, then torch's own kernels
rccl_separate
nccl_compiled         the same with these in one kernel of torch.compile
flycomm_separate      torch's own kernels after flycomm's all-reduce
flashinfer_fused      all of it in TensorRT-LLM's one-shot kernel, the better of PDL on and off
gloo_experts, nccl_…  the experts' weighted sum by torch's batched product, then as gloo_separate, nccl_separate
rccl_experts
flycomm_apart         flycomm's fused norm after that product
torch_topk            ``torch.topk``
gloo_gather_topk,     top-k exchange: ``torch.topk``, two all-gathers, ``torch.topk``
nccl_…, rccl_…
separate_gloo,        feed-forward layer: torch's matrix products, torch.distributed's all-reduce, torch's norm
separate_nccl, …_rccl
separate_flycomm      the same around flycomm's fused all-reduce, residual and norm
replicated            indexer: every rank scores the whole cache and selects; replicated_scores: without the selection
no_exchange           indexer: a rank's share scored, and the best of it: no bound is lower
cp_gloo_torch,        indexer: a rank's share scored, ``torch.topk``, two all-gathers, ``torch.topk``
cp_nccl_…, cp_rccl_…
===================== ==========================================================================================

Which subjects and reductions each does is in its ``does``. None of them is needed: one that is missing, or fails, is
reported with its reason and has no time.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from functools import partial

from flycomm.bench.baselines.distributed import Gloo, Nccl, NcclWindow, Rccl
from flycomm.bench.baselines.experts import FlycommApart, GlooExperts, NcclExperts, RcclExperts
from flycomm.bench.baselines.flashinfer import FlashInferOneShot
from flycomm.bench.baselines.indexer import (
    CpGlooTorch,
    CpNcclTorch,
    CpRcclTorch,
    NoExchange,
    Replicated,
    ReplicatedScores,
)
from flycomm.bench.baselines.mono import SeparateFlycomm, SeparateGloo, SeparateNccl, SeparateRccl
from flycomm.bench.baselines.separate import (
    FlashInferFused,
    FlycommSeparate,
    GlooSeparate,
    NcclCompiled,
    NcclSeparate,
    RcclSeparate,
)
from flycomm.bench.baselines.symm_mem import TorchLowContention, TorchOneShot, TorchReduceScatter, TorchTwoShot
from flycomm.bench.baselines.topk import GlooGatherTopk, NcclGatherTopk, RcclGatherTopk, TorchTopk
from flycomm.bench.baselines.vllm import Vllm
from flycomm.bench.contender import Contender, Context
from flycomm.errors import UsageError

Variants = Sequence[Callable[[], Contender]]  # the fastest counts

REGISTRY: dict[str, Variants] = {
    "gloo": (Gloo,),
    "nccl": (Nccl,),
    "rccl": (Rccl,),
    "nccl_window": (NcclWindow,),
    "torch_one_shot": (TorchOneShot,),
    "torch_two_shot": (TorchTwoShot,),
    "torch_reduce_scatter": (TorchReduceScatter,),
    "torch_low_contention": (TorchLowContention,),
    "flashinfer_one_shot": (partial(FlashInferOneShot, pdl=False), partial(FlashInferOneShot, pdl=True)),
    "vllm": (Vllm,),
    "gloo_separate": (GlooSeparate,),
    "nccl_separate": (NcclSeparate,),
    "nccl_compiled": (NcclCompiled,),
    "rccl_separate": (RcclSeparate,),
    "flycomm_separate": (FlycommSeparate,),
    "flashinfer_fused": (partial(FlashInferFused, pdl=False), partial(FlashInferFused, pdl=True)),
    "gloo_experts": (GlooExperts,),
    "nccl_experts": (NcclExperts,),
    "rccl_experts": (RcclExperts,),
    "flycomm_apart": (FlycommApart,),
    "torch_topk": (TorchTopk,),
    "gloo_gather_topk": (GlooGatherTopk,),
    "nccl_gather_topk": (NcclGatherTopk,),
    "rccl_gather_topk": (RcclGatherTopk,),
    "separate_gloo": (SeparateGloo,),
    "separate_nccl": (SeparateNccl,),
    "separate_rccl": (SeparateRccl,),
    "separate_flycomm": (SeparateFlycomm,),
    "replicated": (Replicated,),
    "replicated_scores": (ReplicatedScores,),
    "no_exchange": (NoExchange,),
    "cp_gloo_torch": (CpGlooTorch,),
    "cp_nccl_torch": (CpNcclTorch,),
    "cp_rccl_torch": (CpRcclTorch,),
}
# Not everywhere, or minutes to compile: only when asked for.
_EXTRA = ("nccl_window", "flashinfer_one_shot", "vllm", "nccl_compiled", "flashinfer_fused")

# What libraries that are no part of this project raise when they cannot do something here. They have no base of their
# own: a missing module, a refused driver call, a compiler that fails, an assertion about the machine.
SETUP_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    subprocess.SubprocessError,
)


def wanted(against: Sequence[str]) -> list[str]:
    """The names that ``--against`` means: "all", "none", "auto" (those that come with torch), or names. Validated."""
    if list(against) in (["all"], ["auto"], ["none"]):
        return {"all": list(REGISTRY), "auto": [name for name in REGISTRY if name not in _EXTRA], "none": []}[
            against[0]
        ]
    unknown = [name for name in against if name not in REGISTRY]
    if unknown:
        raise UsageError(f"baseline {unknown[0]!r} is not one of {', '.join(REGISTRY)}, all, auto, none; use these")
    return list(against)


def usable(context: Context, names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Collective: which of these can be tried on every rank, and why the others cannot."""
    able, reasons = [], {}
    for name in names:
        reason = next(iter(REGISTRY[name]))().refusal(context)
        said = context.world.vote(reason is None, reason or "")
        if said:
            reasons[name] = reason or said[0]
        else:
            able.append(name)
    return able, reasons
