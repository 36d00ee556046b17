# SPDX-License-Identifier: Apache-2.0
"""What the group's own backend does when flycomm cannot: any dtype, any size, any reduction it knows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from flycomm.errors import UsageError

_REDUCTIONS = ("sum", "avg", "max", "min", "product")


def all_reduce(group: Any, x: torch.Tensor, op: str, out: torch.Tensor | None) -> torch.Tensor:
    """``x`` reduced over ``group``, into ``out`` if given; contract of ``Communicator.all_reduce`` but for the bits."""
    if op not in _REDUCTIONS:
        raise UsageError(f"reduction {op!r} is not one of {', '.join(_REDUCTIONS)}; use one of these")
    result = out if out is not None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if result is not x:
        result.copy_(x)
    buffer = result.contiguous()
    dist.all_reduce(buffer, getattr(dist.ReduceOp, op.upper()), group=group)
    if buffer is not result:
        result.copy_(buffer)
    return result


def barrier(group: Any) -> None:
    dist.barrier(group=group)
