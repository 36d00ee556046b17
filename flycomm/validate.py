# SPDX-License-Identifier: Apache-2.0
"""What a caller may pass, checked once, at the edge: the value, the limit and the remedy in one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flycomm.channel import MAX_WORLD
from flycomm.errors import UsageError
from flycomm.tables import PROTOCOLS
from flycomm.world import World

FALLBACKS = ("group", "error", "none")
ALIGNMENT = 16  # bytes, of what kernels read and write


def check_options(
    world: World,
    max_bytes: int,
    timeout: float,
    fallback: str,
    channels: int,
    protocol: str,
    kernel_channels: dict[str, tuple[int, int]],
    topk: tuple[int, int],
) -> None:
    if world.size > MAX_WORLD:
        raise UsageError(f"a world of {world.size} ranks is over the limit of {MAX_WORLD}; use a group of one node")
    if fallback not in FALLBACKS:
        raise UsageError(f"fallback={fallback!r} is not one of {', '.join(FALLBACKS)}; use one of these")
    if max_bytes < 0 or not math.isfinite(timeout) or timeout < 0:
        raise UsageError(f"max_bytes={max_bytes} and timeout={timeout} must not be negative; timeout=0 waits for ever")
    if protocol != "auto" and protocol not in PROTOCOLS:
        raise UsageError(f"protocol={protocol!r} is not auto or one of {', '.join(PROTOCOLS)}; use one of these")
    if not 1 <= channels <= 16:
        raise UsageError(f"channels={channels} is not in 1..16; one channel a stream is enough")
    if tuple(topk) != (0, 0) and not (1 <= topk[0] <= 64 and 1 <= topk[1] <= 2048):
        raise UsageError(f"topk={tuple(topk)} is not 1..64 rows and a k of 1..2048; leave it out to do without")
    for name, (blocks, num_bytes) in kernel_channels.items():
        if not 1 <= blocks <= 1024 or num_bytes < 1:
            raise UsageError(
                f"kernel channel {name!r}: {blocks} blocks are not in 1..1024, or {num_bytes} bytes under 1"
            )


def usable(x: torch.Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0


def check_like(x: torch.Tensor, out: torch.Tensor, shape: Sequence[int]) -> None:
    """``out`` must be of ``shape``, and of the dtype and device of the input."""
    if tuple(out.shape) != tuple(shape) or out.dtype != x.dtype or out.device != x.device:
        raise UsageError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}, the result {tuple(shape)} {x.dtype} on "
            f"{x.device}; pass an out that is like the result"
        )


def check_apart(whole: torch.Tensor, part: torch.Tensor, own: int | None = None) -> None:
    """Input and output may not share memory, unless ``part`` is exactly what begins at element ``own`` of ``whole``."""
    if own == 0 and part is whole:
        return
    start, length = whole.data_ptr(), _extent(whole)
    other, other_length = part.data_ptr(), _extent(part)
    if not length or not other_length or other >= start + length or start >= other + other_length:
        return
    same = start == other and whole.shape == part.shape and whole.stride() == part.stride()
    if own is not None and (
        (own == 0 and same)
        or (whole.is_contiguous() and part.is_contiguous() and other == start + own * whole.element_size())
    ):
        return
    allowed = "" if own is None else " without being the part of it that belongs to this rank"
    raise UsageError(f"input and output overlap{allowed}; pass disjoint tensors, or call the form that works in place")


def check_scattered(x: torch.Tensor, size: int) -> tuple[int, ...]:
    """The shape of one rank's chunk of ``x``."""
    if x.dim() == 0 or x.shape[0] % size:
        rows = x.shape[0] if x.dim() else "none"
        raise UsageError(f"dimension 0 of {tuple(x.shape)} has {rows} rows, not a multiple of {size} ranks; pad it")
    return (x.shape[0] // size, *x.shape[1:])


def check_gathered(x: torch.Tensor, size: int, dim: int) -> tuple[tuple[int, ...], bool]:
    """The shape of ``size`` such tensors side by side in ``dim``, and whether ``dim`` is the last of several."""
    if x.dim() == 0 or dim not in (0, -1, x.dim() - 1):
        raise UsageError(f"dim={dim} of a tensor with {x.dim()} dimensions is not the first or the last; use 0 or -1")
    if dim == 0 or x.dim() == 1:
        return (size * x.shape[0], *x.shape[1:]), False
    return (*x.shape[:-1], size * x.shape[-1]), True


def _extent(x: torch.Tensor) -> int:
    """Bytes from the first element of ``x`` to the end of its last."""
    if x.is_contiguous() or not x.numel():
        return x.numel() * x.element_size()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()
