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


def all_gather(group: Any, x: torch.Tensor, last: bool, out: torch.Tensor | None) -> torch.Tensor:
    """Every rank's ``x`` side by side in dimension 0, or in the last one."""
    size = dist.get_world_size(group)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=-1 if last else 0, out=out)


def reduce_scatter(group: Any, x: torch.Tensor, op: str, out: torch.Tensor | None) -> torch.Tensor:
    """This rank's chunk of ``x`` reduced over ``group``: an all-reduce, since not every backend can scatter."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    chunk = all_reduce(group, x, op, None).chunk(size)[rank] if x.shape[0] else x
    return chunk.contiguous() if out is None else out.copy_(chunk)


def barrier(group: Any) -> None:
    dist.barrier(group=group)
