# SPDX-License-Identifier: Apache-2.0
"""The same for the sums of experts' rows; contracts in :class:`flycomm.communicator.Communicator`."""

from __future__ import annotations

import torch

from flycomm.ops._library import op
from flycomm.ops.fused import normed_like, quantized_like
from flycomm.ops.registry import lookup

_ROWS = "Tensor expert_out, Tensor topk_weights, Tensor residual, Tensor weight, Tensor? index, Tensor? shared"


def _normed(
    expert_out: torch.Tensor,
    topk_weights: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    index: torch.Tensor | None,
    shared: torch.Tensor | None,
    eps: float,
    gemma: bool,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return normed_like(residual)


def _quantized(
    expert_out: torch.Tensor,
    topk_weights: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    index: torch.Tensor | None,
    shared: torch.Tensor | None,
    quantize: str,
    scale: torch.Tensor | None,
    eps: float,
    gemma: bool,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return quantized_like(residual, quantize, group_name)


@op(
    f"moe_finalize_all_reduce_rms_norm({_ROWS}, float eps, bool gemma, str group_name) -> (Tensor, Tensor)",
    _normed,
)
def moe_finalize_all_reduce_rms_norm(
    expert_out: torch.Tensor,
    topk_weights: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    index: torch.Tensor | None,
    shared: torch.Tensor | None,
    eps: float,
    gemma: bool,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return lookup(group_name).moe_finalize_all_reduce_rms_norm(
        expert_out, topk_weights, residual, weight, eps, gemma, index=index, shared=shared
    )


@op(
    f"moe_finalize_all_reduce_rms_norm_quant({_ROWS}, str quantize, Tensor? scale, float eps, bool gemma, "
    "str group_name) -> (Tensor, Tensor, Tensor)",
    _quantized,
)
def moe_finalize_all_reduce_rms_norm_quant(
    expert_out: torch.Tensor,
    topk_weights: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    index: torch.Tensor | None,
    shared: torch.Tensor | None,
    quantize: str,
    scale: torch.Tensor | None,
    eps: float,
    gemma: bool,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, scales, residual_out = lookup(group_name).moe_finalize_all_reduce_rms_norm_quant(
        expert_out, topk_weights, residual, weight, quantize, scale, eps, gemma, index=index, shared=shared
    )
    return codes, scales if scale is None else scale.clone(), residual_out  # an output is nobody's input
