# SPDX-License-Identifier: Apache-2.0
"""The three steps of ``topk_local``'s split kernel: a bound from a sample, candidates, the last block."""

from collections.abc import Sequence
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.kernels._topk_finish import Rules, least, select
from flycomm.kernels._topk_plan import HEADER, PER_THREAD
from flycomm.primitives import access
from flycomm.primitives.access import load_element, store_element
from flycomm.primitives.reaching import reaching
from flycomm.primitives.score_row import (
    ScoreRow,
    fold_ranks,
    fold_row,
    load_rank,
    load_units,
    load_whole,
    nothing,
    ranks_of,
)
from flycomm.primitives.select import Fold, Scratch, block_scan, places, read, refine, write

_ARRIVED = 4  # offset in a row's header; the count of candidates is at 0
_MARGIN = 16  # how many of the sample reach the bound, beyond one and a half times as many as are expected to


def sample_places(rules: Rules, score_row: ScoreRow) -> list[Any]:
    """Which units of the row are this thread's part of the sample: spread evenly, the same for all blocks."""
    units = max(1, PER_THREAD["sample"] // score_row.per_unit)
    available = fx.Int64(score_row.length // fx.Int32(score_row.per_unit))  # whole ones
    mine = [fx.Int32(fx.thread_idx.x) + fx.Int32(j * rules.threads) for j in range(units)]
    return [fx.Int32((fx.Int64(i) * available) // fx.Int64(units * rules.threads)) for i in mine]


def _is_long(rules: Rules, score_row: ScoreRow) -> Any:
    """Whether the row has more elements than there is room for candidates."""
    return score_row.length > fx.Int32(PER_THREAD["candidates"] * rules.threads)


@flyc.jit
def load_sample(rules: Rules, score_row: ScoreRow, at: Any) -> Any:
    """The units at ``at``, where :func:`sampled_floor` will look at them."""
    units = [nothing(score_row) for _ in at]
    if _is_long(rules, score_row):
        units = load_whole(score_row, at)
    return units


@flyc.jit
def sampled_floor(rules: Rules, scratch: Scratch, score_row: ScoreRow, loaded: Any, at: Any, k: Any) -> Any:
    """The rank that a candidate reaches: every element while the row is short, else by the sample."""
    floor = least(rules)
    samples = fx.Int32(PER_THREAD["sample"] * rules.threads)
    if _is_long(rules, score_row):
        expected = (k * samples + score_row.length - fx.Int32(1)) // score_row.length
        need = expected + expected // fx.Int32(2) + fx.Int32(_MARGIN)
        need = fx.Uint32((need < samples).select(need, samples))
        fold = fold_ranks(ranks_of(score_row, loaded, at))
        room = need + need // fx.Uint32(2)
        floor = refine(fold, fx.Uint32(samples), floor, need, room, rules.index_bits, scratch, rules.threads)
    return floor


@flyc.jit
def append(rules: Rules, scratch: Scratch, score_row: ScoreRow, ahead: Any, at: Any, floor: Any, header: Any) -> None:
    """Append what reaches ``floor`` to the row's candidates; where in the workspace depends on the other blocks.

    ``ahead``: the first of the units at ``at``, loaded already. One bit a score is kept over the block scan: ranks
    would take all of a thread's registers. The few that may reach the floor are read again; one that does not after
    all leaves a 0 in its place.
    """
    loaded = [*ahead, *load_units(score_row, at[len(ahead) :])] if len(ahead) < len(at) else ahead
    reached = reaching(score_row, loaded, at, floor)
    place, total = block_scan(fx.Uint32(fx.math.ctpop(reached)), scratch, rules.threads)
    found = scratch.found
    if fx.thread_idx.x == 0:
        count = access.pointer(header, fx.Uint32, 4)
        write(found, 3, fx.Uint32(fx.atomic_add(count, total, syncscope=access.DEVICE)))
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
        arrived = access.pointer(header + fx.Int64(_ARRIVED), fx.Uint32, 4)
        before = fx.Uint32(fx.atomic_add(arrived, fx.Uint32(1), syncscope=access.DEVICE))
        write(found, 0, before)
        if before == fx.Uint32(blocks - 1):
            fx.memory_fence(ordering=fx.AtomicOrdering.Acquire, syncscope=access.DEVICE)
            write(found, 1, load_element(header, fx.Uint32))
            store_element(header, fx.Uint32(0))
            store_element(header + fx.Int64(_ARRIVED), fx.Uint32(0))
    fx.gpu.barrier()
    return read(found, 0) == fx.Uint32(blocks - 1), read(found, 1)


@flyc.jit
def _load_candidate(header: Any, i: Any, count: Any) -> Any:
    rank = fx.Uint64(0)
    if fx.Uint32(i) < count:
        rank = load_element(header + fx.Int64(HEADER) + fx.Int64(i) * fx.Int64(8), fx.Uint64)
    return rank


def _fold_halves(ranks: Sequence[Any], needed: Any) -> Fold:
    """The fold over ranks in registers, the second half of them only where it is ``needed`` (uniform)."""
    half = len(ranks) // 2

    @flyc.jit
    def fold(step: Any, state: Any) -> Any:
        state = fold_ranks(ranks[:half])(step, state)
        if needed:
            state = fold_ranks(ranks[half:])(step, state)
        return state

    return fold


@flyc.jit
def select_last(
    rules: Rules, scratch: Scratch, chosen: Any, score_row: ScoreRow, header: Any, count: Any, need: Any
) -> Any:
    """Select among the candidates, or from the row where these are not all that is needed."""
    threads, each = rules.threads, PER_THREAD["candidates"]
    at = [fx.Int32(fx.thread_idx.x) + fx.Int32(j * threads) for j in range(each)]
    fits = count <= fx.Uint32(each * threads)
    held = fits.select(count, fx.Uint32(0))
    fold = _fold_halves([_load_candidate(header, i, held) for i in at], held > fx.Uint32(each // 2 * threads))
    _, real = places(fold, least(rules), scratch, threads)
    total = fx.Uint32(0)
    fx.gpu.barrier()
    if fits & (real >= need):
        total = select(rules, fold, real, need, scratch, chosen)
    else:
        total = select(rules, fold_row(score_row, threads, 4), fx.Uint32(score_row.length), need, scratch, chosen)
    return total
