# SPDX-License-Identifier: Apache-2.0
"""Virtual ranks for tests: the same test body on the host target and on GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import flycomm
from flycomm import targets
from flycomm.communicator import Communicator
from flycomm.kernels._topk_exchange_plan import as_counted, lane_channels
from flycomm.residency import Residency
from flycomm.world import World

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
SMALL = 8 << 20  # max_bytes that is enough for most tests


def devices(size: int) -> list[int]:
    """The device of each of ``size`` virtual ranks, dealt out over what the target has."""
    count = max(1, targets.active().runtime.device_count())
    return [rank % count for rank in range(size)]


def sharing(size: int) -> int:
    """How many of ``size`` virtual ranks have the device that most have."""
    return max(Counter(devices(size)).values())


def settle() -> None:
    """Wait for what this rank has launched. Its stream alone: its device may be waiting for another virtual rank."""
    if targets.active().runtime.torch_device_type != "cpu" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().synchronize()


# Torch functions that copy between a GPU and the host: what is on the GPU; what is in two places; by what they index.
_READS = {"cpu", "item", "tolist", "equal", "allclose", "nonzero", "tensor", "as_tensor", "new_tensor"}
_READS |= {"__bool__", "__int__", "__float__", "__index__", "__contains__", "__repr__"}
_MOVES = {"to", "copy_"}
_INDEXES = {"__getitem__", "__setitem__"}  # a tensor or a list; what they set is another tensor


class CopiesWait(TorchFunctionMode):
    """In a thread that is one of several ranks of a GPU: every copy between GPU and host waits for the rank's stream.

    Streams share the GPU's queues of copies. A copy that is queued behind a kernel that waits for a peer would hold up
    the copies of other streams, and with them the peer, until the kernel gives up: see docs/facts.md.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if copies(getattr(func, "__name__", ""), (*args, *kwargs.values())):
            settle()
        return func(*args, **kwargs)


def copies(name: str, given: tuple[Any, ...]) -> bool:
    """Whether the torch function of that name copies between a GPU and the host, given these arguments."""
    if name in _INDEXES:
        index = given[1] if isinstance(given[1], tuple) else (given[1],)
        return given[0].is_cuda and any(isinstance(one, (torch.Tensor, list)) for one in (*index, *given[2:]))
    if name not in _READS and name not in _MOVES:
        return False
    named = (torch.device(one) if isinstance(one, str) else getattr(one, "device", one) for one in given)
    places = {one.type for one in named if isinstance(one, torch.device)}
    return "cuda" in places and (name in _READS or len(places) > 1)


def on_ranks(size: int, body: Callable[..., Any], *args: Any, patience: float = 120.0) -> list[Any]:
    """``body(world, *args)`` on ``size`` virtual ranks, dealt out over the devices; the results in rank order."""
    target = targets.active()
    shared = target.runtime.torch_device_type != "cpu" and sharing(size) > 1

    def rank(world: World) -> Any:
        target.runtime.set_device(world.device)
        with CopiesWait() if shared else nullcontext():
            return body(world, *args)

    return World.local(size, devices=devices(size)).run(rank, timeout=patience)


def run(size: int, body: Callable[..., Any], *args: Any, patience: float = 120.0, **options: Any) -> list[Any]:
    """``body(comm, *args)`` on ``size`` virtual ranks; the results in rank order. ``fallback`` is "error"."""
    settings: dict[str, Any] = {"fallback": "error", "max_bytes": SMALL, "timeout": 20.0} | options
    target = targets.active().name

    def rank(world: World) -> Any:
        with flycomm.init(world=world, target=target, **settings) as comm:
            return body(comm, *args)

    return on_ranks(size, rank, patience=patience)


def resident_rows(size: int, rows: int, k: int, kernel_blocks: int = 0) -> int:
    """The most rows, up to ``rows``, that ``topk=(rows, k)`` may have on ``size`` virtual ranks: where these share GPUs
    with few multiprocessors, fewer blocks stay resident. Beside kernel channels of so many blocks."""
    found = targets.active().capabilities(0)
    if not found.graphs:
        return rows
    budget = Residency.of(found, sharing(size), 1, kernel_blocks)
    for most in range(rows, 0, -1):
        if all(budget.fits(as_counted(grid)) for grid, _ in lane_channels(False, most, k).values()):
            return most
    pytest.skip(f"{size} ranks with {kernel_blocks} blocks of kernel channels each are not resident on these devices")


def sample(comm: Communicator, shape: Any, dtype: torch.dtype, seed: int, rank: int | None = None) -> torch.Tensor:
    """What rank ``rank`` (default: this one) contributes to call ``seed``: different on every rank, made alike."""
    generator = torch.Generator().manual_seed(1000 * seed + (comm.rank if rank is None else rank))
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype).to(comm.device)


def rank_order_sum(comm: Communicator, shape: Any, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The sum over ranks 0, 1, … in f32 from +0.0, rounded once to ``dtype``: what every collective must equal."""
    total = torch.zeros(shape, dtype=torch.float32, device=comm.device)
    for rank in range(comm.world_size):
        total = total + sample(comm, shape, dtype, seed, rank).float()
    return total.to(dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal shape, dtype and bits (so NaN equals the same NaN, and -0.0 is not +0.0)."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    words = torch.int32 if left.element_size() == 4 else torch.int16
    return torch.equal(left.contiguous().view(words), right.contiguous().view(words))
