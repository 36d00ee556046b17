# SPDX-License-Identifier: Apache-2.0
"""Rows of experts on every rank, and what their sum and its norm must be: NumPy and f64, no flycomm arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tests.ranks import DTYPES


@dataclass(frozen=True)
class Case:
    """``layout``: "dense", "permuted" (an expert is on one rank, the others have -1) or "elsewhere" (all on rank 0)."""

    layout: str
    dtype: str = "bf16"
    topk: int = 2
    weight: str = ""
    shared: bool = False

    def inputs(self, rank: int, world: int, rows: int, hidden: int, seed: int) -> dict[str, torch.Tensor | None]:
        """On the CPU: ``expert_out``, ``topk_weights``, ``index`` and ``shared`` of a rank, different on each."""
        made, place = (torch.Generator().manual_seed(1000 * seed + one) for one in (rank, 500))
        dtype, weight = DTYPES[self.dtype], DTYPES[self.weight or self.dtype]
        index = None
        shape: tuple[int, ...] = (rows, self.topk, hidden)
        if self.layout != "dense":
            owner = torch.randint(0, world, (rows, self.topk), generator=place)
            mine = (owner if self.layout == "permuted" else torch.zeros_like(owner)) == rank
            count = int(mine.sum())
            index = torch.full((rows, self.topk), -1, dtype=torch.int32)
            index[mine] = torch.randperm(count, generator=made).to(torch.int32)
            shape = (count, hidden)
        return {
            "expert_out": torch.randn(shape, generator=made).to(dtype),
            "topk_weights": torch.randn((rows, self.topk), generator=made).to(weight),
            "index": index,
            "shared": torch.randn((rows, hidden), generator=made).to(dtype) if self.shared else None,
        }


def weighted_sum(inputs: dict[str, torch.Tensor | None], wide: type = np.float32) -> np.ndarray:
    """Of all rows, every operation in ``wide``, in order, not rounded further."""
    out, weights, index, shared = (None if one is None else one.numpy() for one in _as_f32(inputs))
    assert out is not None
    assert weights is not None
    total = np.zeros((len(weights), out.shape[-1]), wide)
    for row, k in np.ndindex(*weights.shape):
        if index is None or index[row, k] >= 0:
            expert = out[row, k] if index is None else out[index[row, k]]
            total[row] = total[row] + wide(weights[row, k]) * expert.astype(wide)
    return total if shared is None else total + shared.astype(wide)


def _as_f32(inputs: dict[str, torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [one if one is None or name == "index" else one.float() for name, one in inputs.items()]


def added(every: list[dict[str, torch.Tensor | None]], residual: torch.Tensor) -> torch.Tensor:
    """The sum over ranks of their rounded sums, rounded, plus ``residual``: f32. ``every``: inputs in rank order."""
    total = torch.zeros(residual.shape)
    for inputs in every:
        total = total + torch.from_numpy(weighted_sum(inputs)).to(residual.dtype).float()
    return total.to(residual.dtype).float() + residual.float()
