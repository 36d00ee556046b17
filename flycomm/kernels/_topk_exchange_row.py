# SPDX-License-Identifier: Apache-2.0
"""A row's beginning in ``topk_exchange``: its arguments, who owns it, what this rank nominates."""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives.access import load_element
from flycomm.primitives.block_scan import Scratch, clear
from flycomm.primitives.candidates import ID_BITS
from flycomm.primitives.merge import RUN
from flycomm.primitives.nominate import load_nominated, nominate, pin, pinned
from flycomm.primitives.score_row import ScoreRow, fold_ranks, fold_row, load_units, ranks_of
from flycomm.primitives.select_group import group_floor
from flycomm.primitives.shard import local_length

_IN_FLIGHT = 4  # loads of a thread, of a row that is not kept in registers


class Arguments:
    """A launch's arguments for this block's row; trace-time only."""

    def __init__(self, pointers: Any, columns: Any, stride: Any, k: Any, granule: Any, spread: Any, forced: Any):
        addresses = [fx.Int64(fx.ptrtoint(pointer)) for pointer in pointers]
        self.scores, self.ids, self.lengths, self.owners, self.out_scores, self.out_ids, self.out_counts = addresses
        self.row = fx.Int32(fx.block_idx.x)
        self.columns, self.stride, self.k = columns, stride, k
        self.granule, self.spread, self.forced = granule, spread, forced


class Form:
    """What is fixed when the kernel is compiled; see the kernel's ``build``."""

    def __init__(
        self, mode: str, source: str, columns: int, k: int, by_score: bool, low: bool, wide: bool, forced: bool,
        element: Any, threads: int,
    ):  # fmt: skip
        self.mode, self.source, self.columns = mode, source, columns
        self.k, self.by_score, self.low, self.wide, self.forced = k, by_score, low, wide, forced
        self.element, self.threads = element, threads
        self.small = k == RUN
        self.pairs = 1 if self.small else k // (2 * threads)  # that a thread takes from each source


def of_row(address: Any, row: Any) -> Any:
    return address + fx.Int64(row) * fx.Int64(4)


@flyc.jit
def owner_of(comm: Any, a: Arguments) -> Any:
    owner = a.row % fx.Int32(comm.world)
    if a.owners != fx.Int64(0):
        owner = load_element(of_row(a.owners, a.row), fx.Int32)
    return owner


def _clamped(value: Any, limit: Any) -> Any:
    value = (value < limit).select(value, limit)
    return (value > fx.Int32(0)).select(value, fx.Int32(0))


@flyc.jit
def _range(comm: Any, a: Arguments) -> tuple[Any, Any, Any]:
    """How many columns of the row this rank has, and which of them are not forced: from the first up to the last."""
    length, begin, end = a.columns, fx.Int32(0), a.columns
    if a.lengths != fx.Int64(0):
        length = load_element(of_row(a.lengths, a.row), fx.Int32)
        end = length
        if a.spread != fx.Int32(0):
            visible = (length > fx.Int32(0)).select(length, fx.Int32(0))
            world, (first, last) = fx.Int32(comm.world), a.forced
            length = local_length(visible, comm.rank, world, a.granule)
            begin = local_length(_clamped(first, visible), comm.rank, world, a.granule)
            end = local_length(_clamped(visible - last, visible), comm.rank, world, a.granule)
    return _clamped(length, a.columns), begin, end


def nominate_row(comm: Any, a: Arguments, form: Form, chosen: Any, scratch: Scratch) -> Any:
    """The row's local best into ``chosen``; how many."""
    address = a.scores + fx.Int64(a.row) * a.stride * fx.Int64(form.element.width // 8)
    if form.source == "candidates":
        ids = a.ids + fx.Int64(a.row) * a.stride * fx.Int64(4)
        clear(scratch, form.threads)
        load_nominated(address, ids, a.k, form.k, chosen, form.low, form.threads)
        return fx.Uint32(form.k)
    length, begin, end = _range(comm, a)
    need = fx.Uint32((a.k < length).select(a.k, length))
    row = ScoreRow(address, form.element, length, form.wide, ID_BITS, form.low)
    floor = None
    if form.columns:
        units = max(1, form.columns // (form.threads * row.per_unit))
        at = [fx.Int32(fx.thread_idx.x) + fx.Int32(j * form.threads) for j in range(units)]
        loaded = load_units(row, at)
        clear(scratch, form.threads)
        fx.gpu.barrier()
        ranks = ranks_of(row, loaded, at)
        if form.forced:
            ranks = [pin(rank, begin, end, form.low) for rank in ranks]
        fold = fold_ranks(ranks)
        if form.small:
            floor = group_floor(ranks, need, ID_BITS, scratch, form.threads)
    else:
        clear(scratch, form.threads)
        fx.gpu.barrier()
        fold = fold_row(row, form.threads, _IN_FLIGHT)
        if form.forced:
            fold = pinned(fold, begin, end, form.low)
    return nominate(fold, fx.Uint32(length), need, form.k, chosen, scratch, form.threads, floor)
