# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual + RMSNorm as ops; contracts in :class:`flycomm.communicator.Communicator`."""

from __future__ import annotations

import torch

from flycomm.ops._library import op
from flycomm.ops.registry import lookup

_GROUP = 128  # elements that share a scale


def normed_like(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs without data for (…, hidden) ``rows``: normed, residual."""
    like = torch.empty_like(rows, memory_format=torch.contiguous_format)
    return like, torch.empty_like(like)


def quantized_like(
    rows: torch.Tensor, quantize: str, group_name: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs without data for (…, hidden) ``rows``: codes, scales, residual."""
    codes = rows.new_empty(rows.shape, dtype=lookup(group_name).fp8)
    groups = {"static": (1,), "token": rows.shape[:-1]}.get(quantize, (*rows.shape[:-1], -(-rows.shape[-1] // _GROUP)))
    scales = rows.new_empty(groups, dtype=torch.float32)
    return codes, scales, torch.empty_like(rows, memory_format=torch.contiguous_format)


def _normed(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, gemma: bool, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return normed_like(input)


def _quantized(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    quantize: str,
    scale: torch.Tensor | None,
    eps: float,
    gemma: bool,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return quantized_like(input, quantize, group_name)


@op(
    "all_reduce_rms_norm(Tensor input, Tensor residual, Tensor weight, float eps, bool gemma, str group_name)"
    " -> (Tensor, Tensor)",
    _normed,
)
def all_reduce_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, gemma: bool, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return lookup(group_name).all_reduce_rms_norm(input, residual, weight, eps, gemma)


@op(
    "all_reduce_rms_norm_quant(Tensor input, Tensor residual, Tensor weight, str quantize, Tensor? scale, float eps,"
    " bool gemma, str group_name) -> (Tensor, Tensor, Tensor)",
    _quantized,
)
def all_reduce_rms_norm_quant(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    quantize: str,
    scale: torch.Tensor | None,
    eps: float,
    gemma: bool,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, scales, residual_out = lookup(group_name).all_reduce_rms_norm_quant(
        input, residual, weight, quantize, scale, eps, gemma
    )
    return codes, scales if scale is None else scale.clone(), residual_out  # an output is nobody's input
