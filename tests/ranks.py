# SPDX-License-Identifier: Apache-2.0
"""Virtual ranks for tests: the same test body on the host target and on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import flycomm
from flycomm import targets
from flycomm.communicator import Communicator
from flycomm.world import World

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
SMALL = 8 << 20  # max_bytes that is enough for most tests


def devices(size: int) -> list[int]:
    """The device of each of ``size`` virtual ranks, dealt out over what the target has."""
    count = max(1, targets.active().runtime.device_count())
    return [rank % count for rank in range(size)]


def run(size: int, body: Callable[..., Any], *args: Any, patience: float = 120.0, **options: Any) -> list[Any]:
    """``body(comm, *args)`` on ``size`` virtual ranks; the results in rank order. ``fallback`` is "error"."""
    settings: dict[str, Any] = {"fallback": "error", "max_bytes": SMALL, "timeout": 20.0} | options
    target = targets.pick()
    targets.activate(target)

    def rank(world: World) -> Any:
        target.runtime.set_device(world.device)
        with flycomm.init(world=world, target=target.name, **settings) as comm:
            return body(comm, *args)

    return World.local(size, devices=devices(size)).run(rank, timeout=patience)


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
