# SPDX-License-Identifier: Apache-2.0
"""What a caller may pass, checked once, at the edge: the value, the limit and the remedy in one sentence."""

from __future__ import annotations

import math

import torch

from flycomm.channel import MAX_WORLD
from flycomm.errors import UsageError
from flycomm.geometry import PROTOCOLS
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
    for name, (blocks, num_bytes) in kernel_channels.items():
        if not 1 <= blocks <= 1024 or num_bytes < 1:
            raise UsageError(
                f"kernel channel {name!r}: {blocks} blocks are not in 1..1024, or {num_bytes} bytes under 1"
            )


def usable(x: torch.Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0


def check_out(x: torch.Tensor, out: torch.Tensor) -> None:
    if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
        raise UsageError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}, the input {tuple(x.shape)} {x.dtype} on "
            f"{x.device}; pass an out that is like the input"
        )
    start, length = x.data_ptr(), _extent(x)
    other, other_length = out.data_ptr(), _extent(out)
    same = start == other and x.stride() == out.stride()
    if not same and length and start < other + other_length and other < start + length:
        raise UsageError("out overlaps the input without being it; pass the input itself or a disjoint tensor")


def _extent(x: torch.Tensor) -> int:
    """Bytes from the first element of ``x`` to the end of its last."""
    if not x.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()
