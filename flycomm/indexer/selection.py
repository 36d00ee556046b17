# SPDX-License-Identifier: Apache-2.0
"""``TopK``: what a selection gives."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TopK(NamedTuple):
    """Of each row: f32 scores and i32 global ids (rows, k), i32 counts (rows,)."""

    scores: torch.Tensor
    ids: torch.Tensor
    counts: torch.Tensor
