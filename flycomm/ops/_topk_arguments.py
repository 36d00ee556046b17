# SPDX-License-Identifier: Apache-2.0
"""What a caller of ``topk`` may pass."""

from __future__ import annotations

import torch

from flycomm import targets
from flycomm.dtypes import REDUCIBLE
from flycomm.errors import UsageError
from flycomm.kernels._topk_plan import MAX_COLUMNS, MAX_K

ORDERS = ("score", "index")
TIE_BREAKS = ("low", "high")
ALIGNMENT = 16  # bytes, of a workspace and of rows that are read fast
DTYPES = {getattr(torch, dtype.torch_name): name for name, dtype in REDUCIBLE.items()}


def check_numbers(columns: int, k: int, rows: int = 0) -> None:
    if min(rows, columns) < 0:
        raise UsageError(f"{rows} rows of {columns} columns cannot be; pass numbers of at least 0")
    if not 1 <= k <= MAX_K:
        raise UsageError(f"k={k} is not in 1..{MAX_K}; select in parts and merge them")
    if columns > MAX_COLUMNS:
        raise UsageError(f"{columns} columns are over the limit of {MAX_COLUMNS}; select in parts and merge them")


def check_call(scores: torch.Tensor, k: int, lengths: torch.Tensor | None, order: str, tie_break: str) -> None:
    if scores.dim() != 2 or scores.dtype not in DTYPES:
        raise UsageError(
            f"scores are {scores.dim()}-dimensional {scores.dtype}; pass (rows, columns) of {', '.join(REDUCIBLE)}"
        )
    check_numbers(scores.shape[1], k)
    if scores.numel() > 1 and scores.shape[1] > 1 and scores.stride(1) != 1:
        raise UsageError(f"columns are {scores.stride(1)} elements apart, not 1; pass scores.contiguous()")
    expected = targets.active().runtime.torch_device_type
    if scores.device.type != expected:
        raise UsageError(f"scores are on {scores.device}, kernels run on {expected}; move them there")
    if order not in ORDERS or tie_break not in TIE_BREAKS:
        raise UsageError(
            f"order={order!r} is not one of {', '.join(ORDERS)}, or tie_break={tie_break!r} of "
            f"{', '.join(TIE_BREAKS)}; use these"
        )
    if lengths is not None and (
        lengths.shape != scores.shape[:1]
        or lengths.dtype != torch.int32
        or lengths.device != scores.device
        or not lengths.is_contiguous()
    ):
        raise UsageError(
            f"lengths are {tuple(lengths.shape)} {lengths.dtype} on {lengths.device}; pass a contiguous int32 tensor "
            f"of {scores.shape[0]} beside the scores"
        )


def check_workspace(workspace: torch.Tensor, scores: torch.Tensor, num_bytes: int) -> None:
    size = workspace.numel() * workspace.element_size()
    if (
        size < num_bytes
        or workspace.device != scores.device
        or not workspace.is_contiguous()
        or workspace.data_ptr() % ALIGNMENT
    ):
        raise UsageError(
            f"the workspace has {size} bytes on {workspace.device}, {num_bytes} are needed on {scores.device}, aligned "
            f"to {ALIGNMENT}; make one with topk_workspace"
        )
