# SPDX-License-Identifier: Apache-2.0
"""The local best k of a row, as ranks with global ids in shared memory: what a rank nominates for the whole top-k.

A row is a fold over its ranks (:mod:`flycomm.primitives.select`) with local indices of :data:`ID_BITS` bits. Every
thread of the block calls every function here, but for :func:`pin`.
"""

from collections.abc import Sequence
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives.access import load_element
from flycomm.primitives.block_scan import Scratch, read, write
from flycomm.primitives.candidates import ID_BITS
from flycomm.primitives.rank import element_of, ordered_key, rank_of
from flycomm.primitives.select import Fold, compact, places, refine
from flycomm.primitives.shard import global_of
from flycomm.primitives.sort import sort_block

PINNED = 0xFFFFFFFF  # the key of a forced id: above that of every score
_DISORDER = 3  # place in ``scratch.found`` of whether a rank precedes a greater one


def least() -> Any:
    """The rank (u64) that every element reaches; 0 stands for none."""
    return fx.Uint64(1 << ID_BITS)


def pin(rank: Any, first: Any, last: Any, low: bool) -> Any:
    """The rank, or one above all others if its local index is below ``first`` or from ``last`` on (i32).

    It stays so on its way, so a forced id is pinned in the merge as well.
    """
    _, index = element_of(rank, ID_BITS, low)
    forced = (rank != fx.Uint64(0)) & ((index < first) | (index >= last))
    return rank | forced.select(fx.Uint64(PINNED << ID_BITS), fx.Uint64(0))


def pinned(fold: Fold, first: Any, last: Any, low: bool) -> Fold:
    """The fold over the same ranks, each after :func:`pin`."""
    return lambda step, state: fold(lambda rank, so_far: step(pin(rank, first, last, low), so_far), state)


@flyc.jit
def nominate(fold: Fold, total: Any, need: Any, k: int, chosen: Any, scratch: Scratch, threads: int, floor: Any) -> Any:
    """Write the greatest of the fold's ranks to ``chosen``: at least ``need`` and at most ``k``; how many (u32).

    ``chosen`` holds ``k`` (compile-time) ranks in shared memory. Of the ``total`` (u32) elements ``need`` <= ``k`` are
    wanted: the whole local top-k, never a part of it. ``floor``: a rank that at least ``need`` reach, or None.
    ``scratch`` is clear. Deterministic as a set, not in its order.
    """
    room = fx.Uint32(k)
    if fx.const_expr(floor is None):
        bound = refine(fold, total, least(), need, room, ID_BITS, scratch, threads)
        place, count = places(fold, bound, scratch, threads)
    else:
        place, count = places(fold, floor, scratch, threads)
        bound = floor
        if count > room:
            fx.gpu.barrier()  # a warp may still read what the scan left, and a refinement writes there at once
            bound = refine(fold, count, floor, need, room, ID_BITS, scratch, threads)
            place, count = places(fold, bound, scratch, threads)
    compact(fold, bound, place, lambda i, rank: write(chosen, fx.Int32(i), rank))
    return count


def given_ranks(scores: Any, ids: Any, at: Sequence[Any], k: Any, low: bool) -> list[Any]:
    """The ranks of the ``at``-th (i32) of ``k`` >= 1 f32 scores and i32 ids by address, whose loads travel together; 0
    beyond them, or where an id is -1."""
    inside = [i < k for i in at]
    offsets = [fx.Int64(here.select(i, fx.Int32(0))) * fx.Int64(4) for here, i in zip(inside, at, strict=True)]
    found = [(load_element(scores + one, fx.Uint32), load_element(ids + one, fx.Int32)) for one in offsets]
    ranks = []
    for here, (bits, index) in zip(inside, found, strict=True):
        rank = rank_of(ordered_key(bits), index, ID_BITS, low)
        ranks.append((here & (index >= fx.Int32(0))).select(rank, fx.Uint64(0)))
    return ranks


def global_rank(comm: Any, local: Any, granule: Any, low: bool) -> Any:
    """A local rank (u64, not 0) with its global id; ``granule`` (i32): of :mod:`flycomm.primitives.shard`."""
    key, index = element_of(local, ID_BITS, low)
    by = (fx.Uint32(one) for one in (index, comm.rank, comm.world, granule))  # unsigned: divides in half the time
    return rank_of(key, global_of(*by), ID_BITS, low)


@flyc.jit
def load_nominated(
    comm: Any, scores: Any, ids: Any, count: Any, k: int, chosen: Any, granule: Any, low: bool, scratch: Scratch,
    threads: int,
) -> None:  # fmt: skip
    """To ``chosen``: the ranks with global ids, falling, of ``count`` (i32, 1 to ``k``) f32 scores and i32 local ids by
    address, all different, -1 for none; 0 behind them.

    In place of :func:`settle` and a sort; those that come in order are not sorted. Ends with a block barrier.
    """
    thread = fx.Int32(fx.thread_idx.x)
    at = [thread + fx.Int32(n * threads) for n in range(max(1, k // threads))]
    held = [i < fx.Int32(k) for i in at]
    ranks = [
        (local != fx.Uint64(0)).select(global_rank(comm, local, granule, low), fx.Uint64(0))
        for local in given_ranks(scores, ids, at, count, low)
    ]
    found = scratch.found
    if thread == fx.Int32(0):
        write(found, _DISORDER, fx.Uint32(0))
    for n in fx.range_constexpr(len(at)):
        if held[n]:
            write(chosen, at[n], ranks[n])
    fx.gpu.barrier()
    for n in fx.range_constexpr(len(at)):
        after = at[n] + fx.Int32(1)
        inside = after < fx.Int32(k)
        if inside & (ranks[n] < read(chosen, inside.select(after, fx.Int32(0)), fx.Uint64)):
            write(found, _DISORDER, fx.Uint32(1))
    fx.gpu.barrier()
    if read(found, _DISORDER) != fx.Uint32(0):
        sort_block(chosen, k, ID_BITS, scratch, threads)


@flyc.jit
def settle(comm: Any, chosen: Any, total: Any, k: int, granule: Any, low: bool, threads: int) -> None:
    """Give the ``total`` (u32) local ranks in ``chosen`` their global ids, and fill the rest of ``k`` with 0.

    ``granule`` (i32): of the shard (:mod:`flycomm.primitives.shard`). Begins and ends with a block barrier.
    """
    fx.gpu.barrier()
    i = fx.Int32(fx.thread_idx.x)
    while i < fx.Int32(k):
        local = read(chosen, i, fx.Uint64)
        rank = global_rank(comm, local, granule, low)
        held = (fx.Uint32(i) < total) & (local != fx.Uint64(0))
        write(chosen, i, held.select(rank, fx.Uint64(0)))
        i = i + fx.Int32(threads)
    fx.gpu.barrier()
