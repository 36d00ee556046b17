# SPDX-License-Identifier: Apache-2.0
"""``Peers``: everything a kernel needs to talk on one channel, passed by value."""

from __future__ import annotations

from functools import cache
from typing import Any

import flydsl.expr as fx

from flycomm.channel import MAX_WORLD
from flycomm.errors import UsageError


@cache
def peers_type(world: int, blocks: int) -> Any:
    """The kernel-argument struct of a channel with ``world`` ranks and a grid of ``blocks`` blocks.

    Annotate a kernel parameter with it: ``def layer(comm: peers_type(2, 8), ...)``. Fields:

    - ``world``, ``blocks``: compile-time ints.
    - ``rank``: this rank (i32).
    - ``limit``: how long a wait may last, in ticks of the device clock (i64); 0 waits for ever.
    - ``capacity``: bytes of one staging slot (i64).
    - ``state``, ``record``: addresses of this rank's per-block state and of its record (i64).
    - ``segment0``: address of this rank's own segment; ``segment<j>``: of the segment of rank ``(rank + j) % world``.
      Rotated by the host, so that a push to every peer is a loop over compile-time ``j`` with no select in it.

    Peer addresses travel by value: a pointer table in memory costs a dependent load at the worst moment.
    """
    if not 1 <= world <= MAX_WORLD:
        raise UsageError(f"a world of {world} ranks is not in 1..{MAX_WORLD}; use a smaller group")
    annotations: dict[str, Any] = {
        "world": fx.Constexpr[int],
        "blocks": fx.Constexpr[int],
        "rank": fx.Int32,
        "limit": fx.Int64,
        "capacity": fx.Int64,
        "state": fx.Int64,
        "record": fx.Int64,
    }
    annotations |= {f"segment{j}": fx.Int64 for j in range(world)}
    return fx.struct(type(f"Peers{world}x{blocks}", (), {"__annotations__": annotations}))


@cache
def addresses_type(world: int) -> Any:
    """The kernel-argument struct of one tensor that every rank has: ``address0`` is the own one's, ``address<j>`` that
    of rank ``(rank + j) % world`` (i64, as this rank's device sees it)."""
    annotations = {f"address{j}": fx.Int64 for j in range(world)}
    return fx.struct(type(f"Addresses{world}", (), {"__annotations__": annotations}))


def address_of(memory: Any, j: int) -> Any:
    """Address (i64) in an :func:`addresses_type`; ``j`` is a compile-time int."""
    return getattr(memory, f"address{j}")


def segment(comm: Any, j: int) -> Any:
    """Address (i64) of the segment of rank ``(rank + j) % world``; ``j`` is a compile-time int, 0 the own one."""
    return getattr(comm, f"segment{j}")


def in_rank_order(comm: Any, own: Any, theirs: Any) -> list[Any]:
    """``theirs[j - 1]``, a value of rank ``(rank + j) % world``, and ``own`` in the order of ranks 0, 1, …

    By selects: an index that is only known at run time would push the values through memory.
    """
    ordered = []
    for rank in range(comm.world):
        value = own
        for j in range(1, comm.world):
            value = (peer_rank(comm, j) == fx.Int32(rank)).select(theirs[j - 1], value)
        ordered.append(value)
    return ordered


def peer_rank(comm: Any, j: int) -> Any:
    """The rank (i32) whose segment is ``segment(comm, j)``."""
    shifted = comm.rank + fx.Int32(j)
    return (shifted >= fx.Int32(comm.world)).select(shifted - fx.Int32(comm.world), shifted)
