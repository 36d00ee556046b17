# SPDX-License-Identifier: Apache-2.0
"""What a row's RMSNorm and its 8-bit form must be, to the bit, in numpy and torch: the formulas of the primitives."""

from __future__ import annotations

import numpy as np
import torch

from flycomm.primitives.quant import GROUP, Fp8


def sum_of_squares(row: torch.Tensor, per_fragment: int) -> np.float32:
    """An fma chain in every fragment, then the tree over fragments, the highest bit first. ``row`` is f32."""
    fragments = row.numpy().reshape(-1, per_fragment)
    chain = np.zeros(len(fragments), np.float32)
    for e in range(per_fragment):
        x = fragments[:, e].astype(np.longdouble)  # a product of f32 is exact, and its sum nearly so
        chain = (x * x + chain).astype(np.float32)
    level = np.zeros(1 << (len(fragments) - 1).bit_length(), np.float32)
    level[: len(fragments)] = chain
    while len(level) > 1:
        level = level[: len(level) // 2] + level[len(level) // 2 :]
    return level[0]


def rms_norm(
    rows: torch.Tensor, weight: torch.Tensor, eps: float, per_fragment: int, gemma: bool = False
) -> torch.Tensor:
    """f32, of f32 ``rows``, (rows, hidden)."""
    factor = weight.float() + 1.0 if gemma else weight.float()
    normed = []
    for row in rows:
        mean = sum_of_squares(row, per_fragment) / np.float32(len(row))
        scale = np.float32(1.0) / np.sqrt(mean + np.float32(eps))
        normed.append(row * float(scale) * factor)
    return torch.stack(normed)


def rms_norm_exact(rows: torch.Tensor, weight: torch.Tensor, eps: float, gemma: bool = False) -> torch.Tensor:
    """f64."""
    x = rows.double()
    factor = weight.double() + 1.0 if gemma else weight.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + float(np.float32(eps))) * factor


def cast(x: torch.Tensor, fmt: Fp8) -> torch.Tensor:
    """torch's saturating cast of f32 to ``fmt``, as bytes; every NaN the format's one."""
    codes = x.clamp(-fmt.largest, fmt.largest).to(getattr(torch, fmt.torch_name)).view(torch.uint8)
    return torch.where(x.isnan(), torch.tensor(fmt.nan, dtype=torch.uint8), codes)


def quantize(rows: torch.Tensor, how: str, fmt: Fp8, floor: float, static: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Codes (rows, hidden) and f32 scales of ``rows``, f32: by "static", "token" or "group"."""
    if how == "static":
        return cast(rows * (1.0 / torch.tensor(static)), fmt), torch.tensor([static])
    size = GROUP if how == "group" else rows.shape[1]
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % size)).unflatten(1, (-1, size))
    scale = padded.abs().amax(-1) / fmt.largest
    scale = torch.where(scale < floor, torch.tensor(floor), scale)
    codes = cast(padded * (1.0 / scale)[..., None], fmt).flatten(1)[:, : rows.shape[1]]
    return codes, scale.squeeze(1) if how == "token" else scale
