# SPDX-License-Identifier: Apache-2.0
"""What follows the all-reduce, in torch: residual and RMSNorm, and the row in 8 bits."""

from __future__ import annotations

import torch

from flycomm.kernels.reduce_norm import Variant
from flycomm.primitives.quant import GROUP, Fp8


def add_and_norm(
    total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, gemma: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(normed, residual_out)`` of (…, hidden), each rounded once to the type of ``total``."""
    added = total.float() + residual.float()
    factor = weight.float() + 1.0 if gemma else weight.float()
    rows = added * torch.rsqrt((added * added).mean(-1, keepdim=True) + eps)
    return (rows * factor).to(total.dtype), added.to(total.dtype)


def quantize(normed: torch.Tensor, how: str, fp8: Fp8, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """``(codes, scales)`` of (…, hidden), by "token" or "group", or with ``scale`` by "static"."""
    wide = normed.float()
    if how == "static":
        assert scale is not None
        scales = divisor = scale
    else:
        size = GROUP if how == "group" else wide.shape[-1]
        groups = torch.nn.functional.pad(wide, (0, -wide.shape[-1] % size)).unflatten(-1, (-1, size))
        # By a tensor: on GPUs torch multiplies by the reciprocal of a number, and the kernel divides.
        scales = (groups.abs().amax(-1) / wide.new_full((), fp8.largest)).clamp(min=Variant.floor)
        divisor = scales.repeat_interleave(size, -1)[..., : wide.shape[-1]]
        scales = scales.squeeze(-1) if how == "token" else scales
    codes = (wide * (1.0 / divisor)).clamp(-fp8.largest, fp8.largest)
    return codes.to(getattr(torch, fp8.torch_name)), scales
