# SPDX-License-Identifier: Apache-2.0
"""``topk_local``'s selection from a row that one block holds in its registers."""

from functools import partial
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.kernels._topk_finish import Rules, room_of, select
from flycomm.primitives.group_floor import group_floor
from flycomm.primitives.result import keep
from flycomm.primitives.score_row import ScoreRow, fold_ranks, load_units, ranks_of
from flycomm.primitives.select import GROUP, Fold, Scratch, clear, compact, places, read, refine, tally, write


@flyc.jit
def _gather(rules: Rules, scratch: Scratch, chosen: Any, fold: Fold, floor: Any) -> Any:
    """Write what reaches ``floor`` to ``chosen``, in any order, while there is room: how many reach it. Few do."""
    counter, mine = scratch.found + fx.Int32(3), fold(partial(tally, floor), fx.Uint32(0))
    if mine > fx.Uint32(0):
        place = fx.Uint32(fx.atomic_add(counter, mine, syncscope="workgroup"))
        compact(fold, floor, place, partial(keep, chosen, rules.k))
    fx.gpu.barrier()
    return read(scratch.found, 3)


@flyc.jit
def select_row(rules: Rules, scratch: Scratch, chosen: Any, score_row: ScoreRow, units: int, need: Any) -> Any:
    """Select from a row, ``units`` loads a thread: how many there are in ``chosen`` now, for ``finish``."""
    threads = rules.threads
    thread = fx.Int32(fx.thread_idx.x)
    at = [thread + fx.Int32(j * threads) for j in range(units)]
    ranks = ranks_of(score_row, load_units(score_row, at), at)
    fold, total = fold_ranks(ranks), fx.Uint32(score_row.length)
    if fx.const_expr(rules.small):
        if thread == fx.Int32(0):
            write(scratch.found, 3, fx.Uint32(0))
        floor = group_floor(ranks, need, rules.index_bits, scratch, threads)
        room, parted = room_of(rules, need), need <= fx.Uint32(threads // GROUP)
        if parted:
            total = _gather(rules, scratch, chosen, fold, floor)
        if (total > room) | (parted == fx.Boolean(False)):
            clear(scratch, threads)
            fx.gpu.barrier()
            bound = refine(fold, total, floor, need, room, rules.index_bits, scratch, threads)
            place, total = places(fold, bound, scratch, threads)
            compact(fold, bound, place, lambda i, rank: write(chosen, fx.Int32(i), rank))
    else:
        clear(scratch, threads)
        fx.gpu.barrier()
        total = select(rules, fold, total, need, scratch, chosen)
    return total
