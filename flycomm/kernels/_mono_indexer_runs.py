# SPDX-License-Identifier: Apache-2.0
"""Long rows of scores, for one block to select from: every block lists the best of its run of the row beforehand.

A *run* is what one block has scored of a row. The block lists what reaches a bound of its own choice: half again as
many as would be among the best if these were spread evenly. Who selects (:mod:`flycomm.kernels._mono_indexer_select`)
looks at a run's scores again only if the bound was too high.

A row's record in the scratch: a header of :data:`HEADER` bytes a block, (epoch u32, count u32, bound u64, first and end
column i32), then ``room`` ranks (u64) a block. A header of another epoch is of another launch: nothing is reset.
"""

from dataclasses import dataclass
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.kernels._index_score_task import Task
from flycomm.kernels._topk_exchange_row import Arguments, Form, at_row, open_row
from flycomm.primitives.access import store_element
from flycomm.primitives.block_scan import Scratch, clear
from flycomm.primitives.call import Call
from flycomm.primitives.candidates import ID_BITS
from flycomm.primitives.nominate import least, pinned
from flycomm.primitives.ready import MARK_BYTES
from flycomm.primitives.score_row import ScoreRow, fold_row
from flycomm.primitives.select import Fold, compact, places, refine

HEADER = 32  # bytes
_FIELDS = (0, 4, 8, 16, 20)  # where epoch, count, bound, first and end column lie in it
_RANK_BYTES = 8
IN_FLIGHT = 4  # loads of a thread
_LINE = 256  # bytes
_MARGIN = 16  # ranks that a run lists, beyond half again its share


@dataclass(frozen=True)
class Runs:
    """Where lists lie; ``address`` (i64) is the first row's, the rest are ints. Trace-time only."""

    address: Any
    blocks: int
    room: int

    def row(self, row: Any) -> Any:
        return self.address + fx.Int64(row) * fx.Int64(row_bytes(self.blocks, self.room))

    def header(self, row: Any, block: Any) -> Any:
        return self.row(row) + fx.Int64(block) * fx.Int64(HEADER)

    def rank(self, row: Any, i: Any) -> Any:
        """Address of place ``i`` (i32), ``block * room`` being a block's first."""
        return self.row(row) + fx.Int64(self.blocks * HEADER) + fx.Int64(i) * fx.Int64(_RANK_BYTES)


def marks_bytes(blocks: int) -> int:
    """Of the ready marks before the records, with what keeps them apart."""
    return -(-blocks * MARK_BYTES // _LINE) * _LINE


def row_bytes(blocks: int, room: int) -> int:
    return blocks * (HEADER + room * _RANK_BYTES)


def room_of(k: int, blocks: int) -> int:
    """Ranks that a block may list of a row: twice its share and margin, a power of two, at most ``k`` (a class)."""
    return min(k, 1 << (2 * -(-k // blocks) + _MARGIN - 1).bit_length())


def segment(comm: Any, a: Arguments, form: Form, first: Any, end: Any) -> tuple[Any, Fold]:
    """How many columns of the row lie in ``first`` to ``end`` (i32), and the fold over them; a unit begins there."""
    row, begin, forced_end = open_row(comm, a, form)
    end = (end < row.length).select(end, row.length)
    part = ScoreRow(row.address, row.dtype, end, row.wide, ID_BITS, row.low)
    fold = fold_row(part, form.threads, IN_FLIGHT, first // fx.Int32(row.per_unit))
    held = end - first
    held = (held > fx.Int32(0)).select(held, fx.Int32(0))
    return (row.length, held), pinned(fold, begin, forced_end, form.low) if form.forced else fold


def _best(call: Call, runs: Runs, a: Arguments, form: Form, scratch: Scratch, fold: Fold, need: Any, held: Any) -> Any:
    """At least ``need`` (i32) of a run's ``held`` ranks to this block's list; how many, and the bound."""
    room = fx.Int32(runs.room)
    need = fx.Uint32((need < room).select(need, room))
    clear(scratch, form.threads)
    fx.gpu.barrier()
    bound = refine(fold, fx.Uint32(held), least(), need, fx.Uint32(runs.room), ID_BITS, scratch, form.threads)
    place, count = places(fold, bound, scratch, form.threads)
    begin = runs.rank(a.row, call.block * room)
    compact(fold, bound, place, lambda i, rank: store_element(begin + fx.Int64(i) * fx.Int64(_RANK_BYTES), rank))
    return count, bound


@flyc.jit
def _store_header(header: Any, values: Any) -> None:
    if fx.thread_idx.x == 0:
        for i in fx.range_constexpr(len(values)):
            store_element(header + fx.Int64(_FIELDS[i]), values[i])


def _list(
    call: Call, runs: Runs, a: Arguments, form: Form, scratch: Scratch, ends: Any, held: Any, length: Any
) -> None:
    _, fold = segment(call.comm, a, form, *ends)
    share = fx.Int32((fx.Int64(a.k) * fx.Int64(held) + fx.Int64(length) - fx.Int64(1)) // fx.Int64(length))
    need = share + share // fx.Int32(2) + fx.Int32(_MARGIN)
    count, bound = _best(call, runs, a, form, scratch, fold, (need < held).select(need, held), held)
    all_of_it = count == fx.Uint32(held)
    _store_header(runs.header(a.row, call.block), (call.epoch, count, all_of_it.select(fx.Uint64(0), bound), *ends))
    fx.gpu.barrier()


@flyc.jit
def _list_row(
    call: Call, runs: Runs, a: Arguments, row: Any, form: Form, scratch: Scratch, first: Any, end: Any
) -> None:
    one = at_row(a, row)
    (length, held), _ = segment(call.comm, one, form, first, end)
    if held > fx.Int32(0):
        _list(call, runs, one, form, scratch, (first, end), held, length)


def lister(call: Call, runs: Runs, a: Arguments, form: Form, scratch: Scratch) -> Any:
    """A body for ``each_run`` that lists the best of this block's run of every row of a request.

    After the whole block has stored its scores, waited for them, and met. For an indexer whose rows have one list each.
    """

    @flyc.jit
    def body(task: Task, request: Any, length: Any, begin: Any, end: Any) -> None:
        first, count = task.number(task.first_row, request), task.number(task.row_count, request)
        unit = fx.Int32(task.unit)
        row = first
        while row < first + count:
            _list_row(call, runs, a, row, form, scratch, begin * unit, end * unit)
            row = row + fx.Int32(1)

    return body
