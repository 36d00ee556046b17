# SPDX-License-Identifier: Apache-2.0
"""Rounds of every litmus test on the ranks of a world, and what came out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flycomm import targets
from flycomm.communicator import Communicator
from flycomm.errors import UsageError
from flycomm.kernels import _litmus_plan as plan
from flycomm.kernels.litmus import litmus
from flycomm.litmus import verdict
from flycomm.residency import check_resident, resident_blocks
from flycomm.start import DEFAULT_MAX_BYTES, init
from flycomm.world import World

_CHANNEL = "litmus"
_TURNS = 4096  # rounds of a block in one launch
_MOST_BLOCKS, _THREADS = 32, 256  # on a GPU
_HOST_BLOCKS, _HOST_THREADS = 2, 128
_SPREAD_S = 2e-6  # how late a group of threads may begin: a few times what a store takes to a peer


@dataclass(frozen=True)
class Settings:
    target: targets.Target
    cases: tuple[tuple[str, str], ...]  # of verdict.CASES
    rounds: int  # at least so many of each
    seed: int
    timeout: float  # seconds that a wait may last


@dataclass(frozen=True)
class Result:
    """``rounds``: meetings of a block with its partner's; ``executions``: pairs of threads in them, an outcome each."""

    shape: str
    order: str
    rounds: int
    executions: int
    outcomes: dict[str, int]
    weak: int
    forbidden: int


def run(world: World, settings: Settings, done: Callable[[str], None] = lambda name: None) -> list[Result]:
    """Collective; every rank gets the same results. ``done`` is called with the name of each test that has ended.

    Raises :class:`UsageError` for one rank, :class:`CommTimeout` if a wait gave up, and what ``init`` raises.
    """
    if world.size < 2:
        raise UsageError("a litmus test needs a peer; pass --world 2 or more, or start several ranks")
    blocks, threads = _grid(world, settings.target)
    slot = plan.slot_bytes(world.size, blocks, threads)
    with init(
        world=world,
        target=settings.target.name,
        fallback="error",
        timeout=settings.timeout,
        max_bytes=DEFAULT_MAX_BYTES + 4 * world.size * slot,  # two slots a rank, rounded up to a power of two
        kernel_channels={_CHANNEL: (blocks, slot)},
    ) as comm:
        kernels = [_loaded(comm, case, blocks, threads) for case in settings.cases]
        counts = torch.zeros(blocks * threads, plan.OUTCOMES, dtype=torch.int32, device=comm.device)
        counts.zero_().sum(0).cpu()  # torch's kernels are loaded before one of ours waits
        world.barrier()
        results = []
        for case, kernel in zip(settings.cases, kernels, strict=True):
            results.append(_play(comm, world, case, kernel, counts, settings))
            done(" ".join(case))
        return results


def _grid(world: World, target: targets.Target) -> tuple[int, int]:
    """Blocks and threads: of a GPU no more than a quarter, with all virtual ranks that share it."""
    if target.runtime.torch_device_type == "cpu":
        return _HOST_BLOCKS, _HOST_THREADS
    sharing = -(-world.size // max(1, target.runtime.device_count())) if world.local else 1
    units = target.capabilities(world.device).compute_units
    return max(1, min(_MOST_BLOCKS, units // (4 * sharing))), _THREADS


def _loaded(comm: Communicator, case: tuple[str, str], blocks: int, threads: int) -> Any:
    specialization = litmus(comm.world_size, *case, blocks, threads)
    kernel = comm._session.load(specialization)
    resident = resident_blocks(kernel, comm._session.target, comm.device.index or 0)
    check_resident(specialization.name, blocks, comm._session.ranks_on_device(), resident)
    return kernel


def pairings(size: int) -> list[list[tuple[int, int]]]:
    """Ways to pair ranks; every two ranks are in exactly one. Where the number is odd, somebody looks on."""
    ways = []
    for total in range(size):
        pairs = [(rank, (total - rank) % size) for rank in range(size) if rank < (total - rank) % size]
        if pairs:
            ways.append(pairs)
    return ways


def roles(pairs: Sequence[tuple[int, int]], shape: str, rank: int) -> tuple[int, int]:
    """The rank that ``rank`` is compared with and the one that it writes to; itself twice for who looks on.

    Where the writers are actors of their own, they are the ranks of another pair, if there is one.
    """
    apart = plan.actors(shape, plan.GROUP) < plan.GROUP
    for index, pair in enumerate(pairs):
        if rank in pair:
            side = pair.index(rank)
            written = pairs[index - 1][1 - side] if apart and len(pairs) > 1 else pair[1 - side]
            return pair[1 - side], written
    return rank, rank


def _play(
    comm: Communicator, world: World, case: tuple[str, str], kernel: Any, counts: torch.Tensor, settings: Settings
) -> Result:
    peers = comm.peers(_CHANNEL)
    shape, order = case
    ways = pairings(world.size)
    turns = -(-settings.rounds // (peers.blocks * sum(map(len, ways))))  # of each block, in each way
    spread = round(_SPREAD_S * settings.target.capabilities(world.device).clock_hz)
    total = torch.zeros(plan.OUTCOMES, dtype=torch.int64)
    for number, pairs in enumerate(ways):
        partner, target = roles(pairs, shape, comm.rank)
        segments = [getattr(peers, f"segment{(other - comm.rank) % world.size}") for other in (partner, target)]
        for begin in range(0, turns, _TURNS):
            counts.zero_()
            seed = (settings.seed + begin + number * turns) & 0x7FFFFFFF
            kernel(peers, *segments, counts.data_ptr(), min(_TURNS, turns - begin), seed, spread, comm.stream())
            settings.target.raise_pending()
            comm._session.synchronize()
            comm.check()
            if comm.rank < partner:  # the other of the pair counts the same
                total += counts.sum(0).cpu()
    return _result(world, shape, order, turns * peers.blocks * sum(map(len, ways)), total.tolist())


def _result(world: World, shape: str, order: str, rounds: int, counted: list[int]) -> Result:
    found: Counter[int] = Counter()
    for payload in world.exchange(json.dumps(counted).encode()):
        found.update(dict(enumerate(json.loads(payload))))
    found = +found
    weak = sum(count for outcome, count in found.items() if verdict.is_weak(shape, outcome))
    forbidden = sum(count for outcome, count in found.items() if verdict.is_impossible(shape, outcome))
    if verdict.forbids_weak(shape, order):
        forbidden += sum(
            count
            for outcome, count in found.items()
            if verdict.is_weak(shape, outcome) and not verdict.is_impossible(shape, outcome)
        )
    outcomes = {verdict.name_of(shape, outcome): count for outcome, count in found.most_common()}
    return Result(shape, order, rounds, sum(found.values()), outcomes, weak, forbidden)
