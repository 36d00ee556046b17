# SPDX-License-Identifier: Apache-2.0
"""One channel and the all-reduce kernels on it, with no communicator in between: for tests of launches themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flycomm import targets
from flycomm.channel import BUFFERS, RECORD_BYTES, SENTINEL, STATE_BYTES, segment_bytes, staging_base
from flycomm.kernels import Specialization, all_reduce_one_shot
from flycomm.memory import SymmetricBuffer
from flycomm.primitives import peers_type
from flycomm.world import World
from tests.ranks import on_ranks

BLOCKS, THREADS, CAPACITY = 2, 64, 8 << 10  # of every channel; bytes of a staging slot
SECONDS = 20  # that a wait may last


def specialization(protocol: str, world: int, dtype: str) -> Specialization:
    return Specialization(f"one_{protocol}", all_reduce_one_shot.build(protocol, "sum"), world, dtype, BLOCKS, THREADS)


@contextmanager
def channel(world: World, protocol: str) -> Iterator[Any]:
    """The ``Peers`` of a new channel. Collective."""
    target, device = targets.active(), world.device
    buffer = SymmetricBuffer(world, target, segment_bytes(BLOCKS, world.size, CAPACITY, BUFFERS[protocol]))
    if protocol == "sentinel":
        base = staging_base(BLOCKS)
        target.memory.fill(buffer.local_address + base, SENTINEL, (buffer.num_bytes - base) // 4, device)
    where = "cpu" if target.runtime.torch_device_type == "cpu" else f"{target.runtime.torch_device_type}:{device}"
    state = torch.zeros(BLOCKS * STATE_BYTES, dtype=torch.uint8, device=where)
    record = target.memory.allocate_mapped(RECORD_BYTES, device)
    target.runtime.synchronize(device)
    world.barrier()
    yield peers_type(world.size, BLOCKS)(
        world=world.size,
        blocks=BLOCKS,
        rank=world.rank,
        limit=round(SECONDS * target.capabilities(device).clock_hz),
        capacity=CAPACITY,
        state=state.data_ptr(),
        record=record.device_address,
        **{f"segment{j}": buffer.addresses[(world.rank + j) % world.size] for j in range(world.size)},
    )
    buffer.close()
    target.memory.free_mapped(record, device)


def ranks(size: int, body: Callable[[World], Any]) -> list[Any]:
    """``body(world)`` on ``size`` virtual ranks of this run's target."""
    targets.activate(targets.pick())
    return on_ranks(size, body)
