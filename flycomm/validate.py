# SPDX-License-Identifier: Apache-2.0
"""What a caller may pass, checked once, at the edge: the value, the limit and the remedy in one sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch

from flycomm.channel import MAX_WORLD
from flycomm.errors import UsageError
from flycomm.tables import OPS, PROTOCOLS
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
    kernel_channels: Mapping[str, tuple[int, int]],
    topk: tuple[int, int],
) -> None:
    check_size(world)
    if fallback not in FALLBACKS:
        raise UsageError(f"fallback={fallback!r} is not one of {', '.join(FALLBACKS)}; use one of these")
    if not whole(max_bytes) or max_bytes < 0:
        raise UsageError(f"max_bytes={max_bytes!r} is not a number of bytes; pass a whole number, such as 64 << 20")
    if not isinstance(timeout, int | float) or not math.isfinite(timeout) or timeout < 0:
        raise UsageError(f"timeout={timeout!r} is not a number of seconds of at least 0; timeout=0 waits for ever")
    if protocol != "auto" and protocol not in PROTOCOLS:
        raise UsageError(f"protocol={protocol!r} is not auto or one of {', '.join(PROTOCOLS)}; use one of these")
    if not whole(channels) or not 1 <= channels <= 16:
        raise UsageError(f"channels={channels!r} is not in 1..16; one channel a stream is enough")
    pair = _pair(topk)
    if pair is None or (pair != (0, 0) and not (1 <= pair[0] <= 64 and 1 <= pair[1] <= 2048)):
        raise UsageError(f"topk={topk!r} is not 1..64 rows and a k of 1..2048; pass topk=(rows, k), or leave it out")
    if not isinstance(kernel_channels, Mapping):
        raise UsageError(f"kernel_channels={kernel_channels!r} is not a dict; pass {{name: (blocks, bytes)}}")
    for name, size in kernel_channels.items():
        pair = _pair(size)
        if not isinstance(name, str) or pair is None or not 1 <= pair[0] <= 1024 or pair[1] < 1:
            raise UsageError(
                f"kernel channel {name!r}: {size!r} is not (blocks, bytes) of 1..1024 blocks and at least 1 byte; name "
                "it by a string"
            )


def check_size(world: World) -> None:
    if world.size > MAX_WORLD:
        raise UsageError(f"a world of {world.size} ranks is over the limit of {MAX_WORLD}; use a group of one node")


def whole(*numbers: Any) -> bool:
    """Whether these are whole numbers, of Python or of numpy."""
    return all(isinstance(one, Integral) for one in numbers)


def _pair(value: Any) -> tuple[int, int] | None:
    """Two whole numbers, or None for what is not."""
    fits = isinstance(value, Sequence) and len(value) == 2 and whole(*value)
    return (value[0], value[1]) if fits else None


def check_tensor(name: str, x: Any, optional: bool = False) -> None:
    if not isinstance(x, torch.Tensor) and not (optional and x is None):
        raise UsageError(f"{name} is {'None' if x is None else f'a {type(x).__name__}'}; pass a tensor")


def check_plan(op: str, dtype: torch.dtype, num_bytes: int) -> None:
    if op not in OPS:
        raise UsageError(f"op={op!r} is not one of {', '.join(OPS)}; use one of these")
    check_dtypes(dtype)
    if not whole(num_bytes) or num_bytes < 0:
        raise UsageError(f"num_bytes={num_bytes!r} is not a number of bytes; pass a whole number of at least 0")


def check_dtypes(*dtypes: torch.dtype) -> None:
    for dtype in dtypes:
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"dtype {dtype!r} is not torch's; pass for example torch.bfloat16")


def sized(shape: Sequence[int], dtype: torch.dtype) -> tuple[tuple[int, ...], int]:
    """The shape of a tensor that is asked for, and its bytes."""
    if not isinstance(shape, Sequence) or not whole(*shape) or any(size < 0 for size in shape):
        raise UsageError(
            f"shape {shape!r} is not a sequence of whole numbers of at least 0; pass for example (4, 1024)"
        )
    check_dtypes(dtype)
    return tuple(shape), math.prod(shape) * dtype.itemsize


def usable(x: torch.Tensor) -> bool:
    """Whether a kernel may go by the address: what torch negates or conjugates as it reads is not in memory yet."""
    return x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0 and not x.is_neg() and not x.is_conj()


def as_usable(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself, or a copy that kernels can read."""
    if usable(x):
        return x
    if x.layout is not torch.strided:
        raise UsageError(f"the tensor is {x.layout}; pass a dense one, such as x.to_dense()")
    return x.clone(memory_format=torch.contiguous_format)


def check_like(x: torch.Tensor, out: torch.Tensor, shape: Sequence[int]) -> None:
    """``out`` must be of ``shape``, of the dtype and device of the input, and every element a place of its own."""
    check_tensor("out", out)
    if tuple(out.shape) != tuple(shape) or out.dtype != x.dtype or out.device != x.device:
        raise UsageError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}, the result {tuple(shape)} {x.dtype} on "
            f"{x.device}; pass an out that is like the result"
        )
    if not out.is_contiguous() and any(
        size > 1 and step == 0 for size, step in zip(out.shape, out.stride(), strict=True)
    ):
        raise UsageError(
            f"out {tuple(out.shape)} has strides {out.stride()}: its elements share memory; pass a tensor of its own"
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
