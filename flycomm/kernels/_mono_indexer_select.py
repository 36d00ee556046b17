# SPDX-License-Identifier: Apache-2.0
"""The best of a long row, from what all blocks have listed of their runs (:mod:`flycomm.kernels._mono_indexer_runs`).

The row's block finds a bound that enough of the listed ranks reach. What reaches it and is not listed lies in runs
whose own bound is higher: of these, and no others, it reads the scores again. So the result is exact, and winners that
lie close together cost time only.
"""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.kernels._mono_indexer_runs import IN_FLIGHT, Runs, segment
from flycomm.kernels._topk_exchange_row import Arguments, Form, open_row
from flycomm.primitives.access import load_element
from flycomm.primitives.block_scan import Scratch, clear, read, write
from flycomm.primitives.call import Call
from flycomm.primitives.candidates import ID_BITS
from flycomm.primitives.nominate import least, nominate
from flycomm.primitives.score_row import fold_ranks
from flycomm.primitives.select import Fold, places, refine

_MOST = 0xFFFFFFFFFFFFFFFF


def _header(call: Call, runs: Runs, row: Any, block: Any) -> tuple[Any, Any]:
    """How many ranks a block has listed in this launch, and its bound."""
    header = runs.header(row, block)
    epoch, count = load_element(header, fx.Uint32), load_element(header + fx.Int64(4), fx.Uint32)
    bound = load_element(header + fx.Int64(8), fx.Uint64)
    return (epoch == call.epoch).select(count, fx.Uint32(0)), bound


def _load(call: Call, runs: Runs, form: Form, row: Any, first: Any, limit: Any) -> list[Any]:
    """Ranks at place ``first`` (i32) and a block's threads further on; 0 where there is none."""
    ranks = []
    for j in range(IN_FLIGHT):
        at = first + fx.Int32(j * form.threads)
        there = at < fx.Int32(runs.blocks * runs.room)
        at = there.select(at, fx.Int32(0))
        count, bound = _header(call, runs, row, at // fx.Int32(runs.room))
        held = there & (fx.Uint32(at % fx.Int32(runs.room)) < count) & (bound <= limit)
        ranks.append(held.select(load_element(runs.rank(row, at), fx.Uint64), fx.Uint64(0)))
    return ranks


def _listed(call: Call, runs: Runs, form: Form, row: Any, limit: Any) -> Fold:
    """The fold over the lists of all blocks whose bound is not above ``limit``."""

    @flyc.jit
    def fold(step: Any, state: Any) -> Any:
        i = fx.Int32(fx.thread_idx.x)
        while i < fx.Int32(runs.blocks * runs.room):
            state = fold_ranks(_load(call, runs, form, row, i, limit))(step, state)
            i = i + fx.Int32(IN_FLIGHT * form.threads)
        return state

    return fold


@flyc.jit
def _find_cut(call: Call, runs: Runs, form: Form, row: Any, limit: Any, cut: Any, scratch: Scratch) -> Any:
    """To ``cut`` (shared memory) the blocks whose bound is above ``limit``; how many."""
    found = scratch.found
    if fx.thread_idx.x == 0:
        write(found, 3, fx.Uint32(0))
    fx.gpu.barrier()
    block = fx.Int32(fx.thread_idx.x)
    while block < fx.Int32(runs.blocks):
        count, bound = _header(call, runs, row, block)
        if (count > fx.Uint32(0)) & (bound > limit):
            i = fx.Uint32(fx.atomic_add(found + 3, fx.Uint32(1), syncscope="workgroup"))
            write(cut, fx.Int32(i), block)
        block = block + fx.Int32(form.threads)
    fx.gpu.barrier()
    return fx.Int32(read(found, 3))


def _ends(runs: Runs, row: Any, block: Any) -> list[Any]:
    """First and end column of a block's run."""
    header = runs.header(row, block)
    return [load_element(header + fx.Int64(offset), fx.Int32) for offset in (16, 20)]


def _again(call: Call, runs: Runs, a: Arguments, form: Form, listed: Fold, cut: Any, count: Any) -> Fold:
    """The fold over ``listed``, and over the scores of the runs in ``cut``."""

    @flyc.jit
    def fold(step: Any, state: Any) -> Any:
        state = listed(step, state)
        i = fx.Int32(0)
        while i < count:
            _, part = segment(call.comm, a, form, *_ends(runs, a.row, read(cut, i, fx.Int32)))
            state = part(step, state)
            i = i + fx.Int32(1)
        return state

    return fold


@flyc.jit
def nominate_from_runs(
    call: Call, runs: Runs, a: Arguments, form: Form, chosen: Any, scratch: Scratch, cut: Any
) -> Any:
    """:func:`flycomm.primitives.nominate.nominate` of the row, once the lists of all blocks are ready; how many.

    ``cut``: shared memory for an i32 a block.
    """
    row, _, _ = open_row(call.comm, a, form)
    need = fx.Uint32((a.k < row.length).select(a.k, row.length))
    listed = _listed(call, runs, form, a.row, fx.Uint64(_MOST))
    clear(scratch, form.threads)
    fx.gpu.barrier()
    _, total = places(listed, least(), scratch, form.threads)
    fx.gpu.barrier()
    bound = least()
    if total >= need:
        bound = refine(listed, total, least(), need, fx.Uint32(form.k), ID_BITS, scratch, form.threads)
    count = _find_cut(call, runs, form, a.row, bound, cut, scratch)
    fold = _again(call, runs, a, form, _listed(call, runs, form, a.row, bound), cut, count)
    return nominate(fold, total, need, form.k, chosen, scratch, form.threads, bound)
