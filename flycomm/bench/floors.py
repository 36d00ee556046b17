# SPDX-License-Identifier: Apache-2.0
"""What no kernel can beat on this machine, measured in the same run as everything else.

``empty``: a launch of the same grid that does nothing. ``flag``: one way of a flag between ranks 0 and 1. ``copy``:
every rank writes to its neighbour at the same time. From these, for the share of a rank (an all-reduce's message, a
shard of the others):

- ``one_shot``, of every collective: the launch, one link latency, and ``(world - 1) × bytes`` out of every rank at the
  rate of the copy: a message, or a shard, to each peer;
- ``two_shot``, of an all-reduce of more than two ranks: the launch, two latencies, and ``2 × (world - 1) / world ×
  bytes``. Which of the two is lower depends on the size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flycomm import kernels
from flycomm.bench import floor_kernels, timing
from flycomm.bench.contender import Context
from flycomm.bench.harness import Method
from flycomm.bench.stats import slowest
from flycomm.geometry import Geometry
from flycomm.memory import SymmetricBuffer
from flycomm.views import tensor_at

_WORDS_BYTES = 4096  # in front of what is copied: a flag word for each rank
_FLAG_STRIDE = 128  # bytes: no two words on one cache line
_COPY_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
_COPIES = 8  # a sample
_FLAG_LIMIT_S = 5.0  # that one rank waits for the other


@dataclass(frozen=True)
class Floor:
    """One measured floor. ``num_bytes`` is 0 for a flag."""

    name: str  # "empty" | "flag" | "copy" | "one_shot" | "two_shot"
    num_bytes: int
    us: float


def measure(context: Context, grids: Mapping[int, Geometry], method: Method) -> list[Floor]:
    """Collective. Floors for shares of so many bytes, with the grids that carry them; one that could not be measured
    is left out.

    Raises :class:`PeerAccessError` on all ranks where they share no memory.
    """
    world = context.world
    empty = {size: _empty_launch(context, grid, method) for size, grid in grids.items()}
    floors = [Floor("empty", size, us) for size, us in empty.items()]
    if world.size == 1:
        return floors
    num_bytes = _COPY_BYTES[context.device.type]
    buffer = SymmetricBuffer(world, context.target, _WORDS_BYTES + num_bytes, name="floors")
    flag = _one_way_flag(context, buffer)
    copy = _copy(context, buffer, num_bytes, method.repeats)
    buffer.close()
    if flag is not None:
        floors.append(Floor("flag", 0, flag))
    if copy is not None:
        floors.append(Floor("copy", num_bytes, copy))
    if flag is not None and copy is not None:
        rate = num_bytes / copy
        floors += [
            Floor("one_shot", size, one_shot_floor(us, flag, rate, world.size, size)) for size, us in empty.items()
        ]
        if _two_shots(context):
            floors += [
                Floor("two_shot", size, two_shot_floor(us, flag, rate, world.size, size)) for size, us in empty.items()
            ]
    return floors


def names(context: Context) -> set[str]:
    """What :func:`measure` gives where everything works."""
    if context.world.size == 1:
        return {"empty"}
    return {"empty", "flag", "copy", "one_shot"} | ({"two_shot"} if _two_shots(context) else set())


def _two_shots(context: Context) -> bool:
    """Two ranks would send as much as one-shot, and wait twice."""
    return context.collective.name == "all_reduce" and context.world.size > 2


def one_shot_floor(empty_us: float, flag_us: float, bytes_per_us: float, world: int, num_bytes: int) -> float:
    """Microseconds: every rank sends the message to every peer over its one link, after a launch, before a flag."""
    return empty_us + flag_us + (world - 1) * num_bytes / bytes_per_us


def two_shot_floor(empty_us: float, flag_us: float, bytes_per_us: float, world: int, num_bytes: int) -> float:
    """Microseconds: a part of the message to every peer, a flag, that part of the result to every peer, a flag."""
    return empty_us + 2 * flag_us + 2 * (world - 1) / world * num_bytes / bytes_per_us


def _empty_launch(context: Context, grid: Geometry, method: Method) -> float:
    handle = kernels.compiled(floor_kernels.empty(grid.blocks, grid.threads))
    context.target.preload(handle, context.world.device)
    anchor = torch.zeros(4, device=context.device)
    stream = context.target.runtime.current_stream(context.world.device)

    def call(_: int) -> None:
        handle(anchor.data_ptr(), stream)

    call(0)
    context.target.raise_pending()
    context.synchronize()
    context.world.barrier()
    if method.mode == "graph":
        samples = timing.Graph(context, call, 1, method.calls).time(method.repeats)
    else:
        samples = timing.eager(context, call, 1, method.calls, method.repeats)
    return slowest(_gather(context, samples)).us


def _one_way_flag(context: Context, buffer: SymmetricBuffer) -> float | None:
    """Half a round trip between ranks 0 and 1, while the others look on; None if one of them did not come."""
    rank = context.world.rank
    hertz = context.target.capabilities(context.world.device).clock_hz
    ticks = torch.zeros(1, dtype=torch.int64, device=context.device)
    handle = kernels.compiled(floor_kernels.ping_pong())
    context.target.preload(handle, context.world.device)
    context.synchronize()
    context.world.barrier()  # all have loaded the kernel before one waits in it
    if rank < 2:
        other = 1 - rank
        own = buffer.local_address + _FLAG_STRIDE * other
        peer = buffer.addresses[other] + _FLAG_STRIDE * rank
        stream = context.target.runtime.current_stream(context.world.device)
        limit = round(_FLAG_LIMIT_S * hertz)
        handle(own, peer, ticks.data_ptr(), limit, int(rank == 0), ticks.data_ptr(), stream)
        context.target.raise_pending()
    context.synchronize()
    (first,), *_ = _gather(context, [float(ticks.item())])
    return None if first < 0 else first / hertz * 1e6 / (2 * floor_kernels.ROUNDS)


def _copy(context: Context, buffer: SymmetricBuffer, num_bytes: int, repeats: int) -> float | None:
    """Microseconds of one copy to the next rank, all ranks at once; None if a copy did not arrive."""
    world, device = context.world, context.device
    following = buffer.addresses[(world.rank + 1) % world.size]
    destination = tensor_at(following + _WORDS_BYTES, num_bytes, device)
    source = torch.full((num_bytes,), world.rank + 1, dtype=torch.uint8, device=device)
    destination.copy_(source)
    samples = timing.eager(context, lambda _: destination.copy_(source), 1, _COPIES, repeats)
    context.synchronize()
    world.barrier()
    before = (world.rank - 1) % world.size + 1
    arrived = bool((tensor_at(buffer.local_address + _WORDS_BYTES, num_bytes, device) == before).all())
    us = slowest(_gather(context, samples)).us
    return us if world.all_of(arrived) else None


def _gather(context: Context, samples: list[float]) -> list[list[float]]:
    return [json.loads(one) for one in context.world.exchange(json.dumps(samples).encode())]
