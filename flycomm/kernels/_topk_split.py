# SPDX-License-Identifier: Apache-2.0
"""Candidates of ``topk_local``'s split kernel, and what the last block does with them."""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.kernels._topk_finish import Rules, select
from flycomm.kernels._topk_plan import HEADER, PER_THREAD
from flycomm.primitives import access
from flycomm.primitives.access import load_element, store_element
from flycomm.primitives.reaching import reaching
from flycomm.primitives.score_row import ScoreRow, fold_ranks, fold_row, load_rank
from flycomm.primitives.select import Fold, Scratch, block_scan, places, read, write
from flycomm.primitives.spread import spread

_AT_ONCE = 4  # candidates that a thread loads before it waits for the first
_ARRIVED = 32  # bit of a row's header, a u64, from which blocks are counted; candidates are in the bits below


def _count(header: Any, more: Any) -> Any:
    """The row's counters (u64) before ``more`` was added to them."""
    return fx.Uint64(fx.atomic_add(access.pointer(header, fx.Uint64, 8), more, syncscope=access.DEVICE))


@flyc.jit
def append(rules: Rules, scratch: Scratch, score_row: ScoreRow, loaded: Any, at: Any, floor: Any, header: Any) -> None:
    """Append what reaches ``floor`` to the row's candidates; where in the workspace depends on the other blocks.

    ``loaded``: the units at ``at``. One bit a score is kept over the block scan: ranks would take all of a thread's
    registers. The few that may reach the floor are read again; one that does not after all leaves a 0 in its place.
    """
    reached = reaching(score_row, loaded, at, floor)
    place, total = block_scan(fx.Uint32(fx.math.ctpop(reached)), scratch, rules.threads)
    found = scratch.found
    if fx.thread_idx.x == 0:
        write(found, 3, fx.Uint32(_count(header, fx.Uint64(total))))
    fx.gpu.barrier()
    i = read(found, 3) + place
    per_unit, threads = score_row.per_unit, rules.threads
    while (reached != fx.Uint32(0)) & (i < fx.Uint32(PER_THREAD["candidates"] * threads)):
        e = fx.Int32(fx.math.cttz(reached))
        index = (at[0] + (e // fx.Int32(per_unit)) * fx.Int32(threads)) * fx.Int32(per_unit) + e % fx.Int32(per_unit)
        rank = load_rank(score_row, index)
        rank = (rank >= floor).select(rank, fx.Uint64(0))
        store_element(header + fx.Int64(HEADER) + fx.Int64(i) * fx.Int64(8), rank)
        reached = reached & (reached - fx.Uint32(1))
        i = i + fx.Uint32(1)


@flyc.jit
def arrive(scratch: Scratch, header: Any, blocks: int) -> Any:
    """Whether this block is the row's last, and how many candidates there are, which it may then read."""
    found = scratch.found
    access.wait_own_stores()
    fx.gpu.barrier()
    if fx.thread_idx.x == 0:
        fx.memory_fence(ordering=fx.AtomicOrdering.Release, syncscope=access.DEVICE)
        before = _count(header, fx.Uint64(1 << _ARRIVED))
        arrived = fx.Uint32(before >> fx.Uint64(_ARRIVED))
        write(found, 0, arrived)
        if arrived == fx.Uint32(blocks - 1):
            fx.memory_fence(ordering=fx.AtomicOrdering.Acquire, syncscope=access.DEVICE)
            write(found, 1, fx.Uint32(before))
            store_element(header, fx.Uint64(0))
    fx.gpu.barrier()
    return read(found, 0) == fx.Uint32(blocks - 1), read(found, 1)


@flyc.jit
def _load_candidate(header: Any, i: Any, count: Any) -> Any:
    rank = fx.Uint64(0)
    if fx.Uint32(i) < count:
        rank = load_element(header + fx.Int64(HEADER) + fx.Int64(i) * fx.Int64(8), fx.Uint64)
    return rank


def _fold_candidates(header: Any, count: Any, threads: int) -> Fold:
    """The fold over ``count`` (u32) candidates, read anew each time."""

    @flyc.jit
    def fold(step: Any, state: Any) -> Any:
        first = fx.Int32(fx.thread_idx.x)
        while fx.Uint32(first) < count:
            ranks = [_load_candidate(header, first + fx.Int32(j * threads), count) for j in range(_AT_ONCE)]
            state = fold_ranks(ranks)(step, state)
            first = first + fx.Int32(_AT_ONCE * threads)
        return state

    return fold


@flyc.jit
def select_last(
    rules: Rules, scratch: Scratch, chosen: Any, score_row: ScoreRow, header: Any, count: Any, floor: Any, need: Any
) -> Any:
    """Select among the candidates, or from the row where these are not all that is needed: how many, and if in order.

    As many as there usually are stay in registers. ``floor``: a rank that all candidates reach.
    """
    threads, each = rules.threads, PER_THREAD["held"]
    total, ordered = need, fx.Boolean(False)
    if count <= fx.Uint32(each * threads):
        at = [fx.Int32(fx.thread_idx.x) + fx.Int32(j * threads) for j in range(each)]
        held = fold_ranks([_load_candidate(header, i, count) for i in at])
        ordered, real = spread(chosen, rules.room, held, floor, need, rules.index_bits, scratch, threads)
        ordered = ordered & (real >= need)
    if ordered == fx.Boolean(False):
        fits = count <= fx.Uint32(PER_THREAD["candidates"] * threads)
        fold = _fold_candidates(header, fits.select(count, fx.Uint32(0)), threads)
        _, real = places(fold, floor, scratch, threads)
        fx.gpu.barrier()
        if fits & (real >= need):
            total = select(rules, fold, real, need, scratch, chosen)
        else:
            total = select(rules, fold_row(score_row, threads, 4), fx.Uint32(score_row.length), need, scratch, chosen)
    return total, ordered
