# SPDX-License-Identifier: Apache-2.0
"""``flycomm.init``: from a group of ranks to a communicator."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from flycomm import env, targets
from flycomm.communicator import Communicator
from flycomm.errors import CommError, TargetError, UsageError
from flycomm.world import World

DEFAULT_MAX_BYTES = 64 << 20


def init(
    group: Any = None,
    *,
    cpu_group: Any = None,
    device: Any = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    timeout: float | None = None,
    fallback: str = "group",
    world: World | None = None,
    target: str | None = None,
    name: str | None = None,
    channels: int = 1,
    protocol: str = "auto",
    table: str | os.PathLike[str] | None = None,
    kernel_channels: Mapping[str, tuple[int, int]] | None = None,
    topk: tuple[int, int] = (0, 0),
    debug: bool | None = None,
) -> Communicator:
    """Make a communicator over a group of ranks. Collective: every rank of the group calls it with the same options.

    ``group``: a ``torch.distributed`` process group of any backend (default: the default group under torchrun, the
    world communicator under mpirun, one rank otherwise). ``cpu_group``: a gloo group of the same ranks for the
    exchange of handles. ``device``: ordinal or ``torch.device`` (default: by local rank). ``world`` replaces all
    three, for virtual ranks (:meth:`World.local`) or MPI.

    ``max_bytes``: peer-mapped memory to allocate, and the largest message. ``timeout``: seconds that a wait inside a
    kernel may last (default ``FLYCOMM_TIMEOUT``; 0 waits for ever). ``fallback``: what a call does that flycomm
    cannot: ``"group"`` uses the group's own backend and logs why once, ``"error"`` raises, ``"none"`` returns None.
    ``target``: "rocm", "cuda" or "host" (default ``FLYCOMM_TARGET``, else the first that can run). ``name``: of the
    communicator in ``torch.ops.flycomm`` (default: the group's own name). ``channels``: how many streams may use it
    at the same time. ``protocol``: "auto" chooses by size, or one of ``tables.PROTOCOLS`` for every size.
    ``table``: the dispatch table that rank 0 reads for all: the path of a file that ``python -m flycomm tune`` wrote,
    or "shipped" (default ``FLYCOMM_TABLE``, else what tune wrote for this chip, else the shipped one).
    ``kernel_channels``: name → (blocks, bytes of all slots), for kernels of your own that call
    :mod:`flycomm.primitives` (:meth:`Communicator.peers`). ``topk``: the most rows and the largest k of
    :meth:`Communicator.topk_exchange`, which needs channels of its own (default: none); calls with more rows take
    ``algo="radix"``. ``debug``: compare every call's arguments across ranks first (default ``FLYCOMM_DEBUG``).

    Raises :class:`~flycomm.errors.TargetError` when the target cannot run,
    :class:`~flycomm.errors.PeerAccessError` on all ranks when one cannot map a peer (unless it may fall back),
    :class:`~flycomm.errors.DisagreementError` when ranks pass different options and
    :class:`~flycomm.errors.UsageError` for options that make no sense.
    """
    if world is not None and not isinstance(world, World):
        raise UsageError(f"world={world!r} is not a flycomm.World; pass one, or leave it out")
    if not isinstance(table, str | os.PathLike | None) or not isinstance(name, str | None):
        raise UsageError(f"table={table!r} is not a path, or name={name!r} not a string; pass these, or leave them out")
    owns_world = world is None
    if world is None:
        world = World.from_group(group, cpu_group, device) if group is not None else World.auto(device)
    try:
        chosen = _activated(world, target)
    except CommError:
        if owns_world:
            world.close()
        raise
    chosen.runtime.set_device(world.device)
    return Communicator(
        world,
        chosen,
        owns_world=owns_world,
        name=name or _name(world),
        max_bytes=max_bytes,
        timeout=env.TIMEOUT.get() if timeout is None else timeout,
        fall_back=fallback,
        channels=channels,
        protocol=protocol,
        table=None if table is None else os.fspath(table),
        kernel_channels={} if kernel_channels is None else kernel_channels,
        topk=topk,
        debug=env.DEBUG.get() if debug is None else debug,
    )


def _activated(world: World, asked: str | None) -> targets.Target:
    """The target, picked and activated. A rank on which it cannot run tells the others, who would wait for it."""
    chosen, problem = None, None
    try:
        chosen = targets.pick(asked)
        targets.activate(chosen)
    except CommError as error:
        problem = error
    reasons = world.vote(problem is None, str(problem or ""))
    if problem is not None:
        raise problem
    if chosen is None or reasons:
        raise TargetError(f"not all ranks can run: {'; '.join(reasons)}")
    return chosen


def _name(world: World) -> str:
    base = getattr(getattr(world, "group", None), "group_name", None) or "flycomm"
    return f"{base}:{world.rank}" if world.local else str(base)
