# SPDX-License-Identifier: Apache-2.0
"""Who measures: the ranks that torchrun or mpirun started this process as, or virtual ranks in it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flycomm.errors import UsageError
from flycomm.targets import Target
from flycomm.world import World

T = TypeVar("T")

DEFAULT_WORLD = 2  # virtual ranks
_LIMIT_S = 3600.0  # of a whole run on virtual ranks; every wait inside has its own, shorter one
_GROUP_LIMIT_S = 120.0  # of one torch.distributed operation: the first of a baseline may compile
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Started:
    """How the ranks came to be. ``launcher``: the words in front of a module's name that start them again."""

    world_size: int
    launcher: tuple[str, ...]
    reports: bool  # whether this process is the one that prints
    local: bool


def over_ranks(
    target: Target,
    world_size: int | None,
    with_group: bool,
    fn: Callable[[World, Any, Started], T],
    default_size: int = DEFAULT_WORLD,
) -> tuple[Started, T]:
    """``fn(world, group, started)`` on every rank; returns what this process's (first) rank returned.

    ``group`` is the process group of all ranks, None for virtual ranks, and under mpirun None unless ``with_group``.
    ``default_size``: virtual ranks where no number is given. Raises :class:`UsageError` where ``world_size`` is not the
    number of ranks that were started.
    """
    if all(name in os.environ for name in _TORCHRUN):
        return _under_torchrun(target, world_size, fn)
    world = World.auto()
    if world.size > 1:
        return _under_mpirun(target, world, world_size, with_group, fn)
    size = default_size if world_size is None else world_size
    started = Started(size, ("python", "-m"), True, True)
    worlds = World.local(size)
    results = worlds.run(lambda one: fn(one, None, started), timeout=_LIMIT_S)
    worlds.close()
    return started, results[0]


def _under_torchrun(
    target: Target, world_size: int | None, fn: Callable[[World, Any, Started], T]
) -> tuple[Started, T]:
    _check_size(world_size, int(os.environ["WORLD_SIZE"]))
    device = _device(target, int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    dist.init_process_group(_backend(device), timeout=timedelta(seconds=_GROUP_LIMIT_S), device_id=device)
    group = dist.group.WORLD
    world = World.from_group(group)
    started = Started(world.size, ("torchrun", "--nproc-per-node", str(world.size), "-m"), world.rank == 0, False)
    result = fn(world, group, started)
    world.close()
    dist.destroy_process_group()
    return started, result


def _under_mpirun(
    target: Target, world: World, world_size: int | None, with_group: bool, fn: Callable[[World, Any, Started], T]
) -> tuple[Started, T]:
    _check_size(world_size, world.size)
    group = None
    if with_group:
        device = _device(target, world.device)
        dist.init_process_group(
            _backend(device),
            init_method=f"tcp://127.0.0.1:{_agreed_port(world)}",
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=_GROUP_LIMIT_S),
            device_id=device,
        )
        group = dist.group.WORLD
    started = Started(world.size, ("mpirun", "-n", str(world.size), "python", "-m"), world.rank == 0, False)
    result = fn(world, group, started)
    if with_group:
        dist.destroy_process_group()
    world.close()
    return started, result


def _check_size(asked: int | None, size: int) -> None:
    if asked is not None and asked != size:
        raise UsageError(f"--world {asked} does not fit the {size} ranks that were started; leave --world out")


def _device(target: Target, local_rank: int) -> torch.device | None:
    """The GPU of this rank, made current; None on a target without GPUs."""
    kind = target.runtime.torch_device_type
    if kind == "cpu":
        return None
    device = torch.device(kind, local_rank % max(1, target.runtime.device_count()))
    target.runtime.set_device(device.index)
    return device


def _backend(device: torch.device | None) -> str:
    return "gloo" if device is None else f"cpu:gloo,{device.type}:nccl"


def _agreed_port(world: World) -> int:
    """A free port of this machine that rank 0 picked."""
    port = b""
    if world.rank == 0:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = str(one.getsockname()[1]).encode()
    return int(world.exchange(port)[0])
