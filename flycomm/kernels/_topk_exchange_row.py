# SPDX-License-Identifier: Apache-2.0
"""A row's beginning in ``topk_exchange`` and ``topk_radix``: its arguments, who owns it, what this rank has of it."""

from collections.abc import Callable
from copy import copy
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives.access import load_element
from flycomm.primitives.block_scan import Scratch, clear
from flycomm.primitives.candidates import ID_BITS
from flycomm.primitives.merge import RUN
from flycomm.primitives.nominate import PINNED, given_ranks, global_rank, load_nominated, nominate, pin, pinned
from flycomm.primitives.nominate_few import elements_of, nominate_few
from flycomm.primitives.score_row import ScoreRow, fold_ranks, fold_row, load_units, ranks_of
from flycomm.primitives.select import Fold
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


def at_row(a: Arguments, row: Any) -> Arguments:
    """The same of row ``row`` (i32)."""
    other = copy(a)
    other.row = row
    return other


class Form:
    """What is fixed when the kernel is compiled; see the kernel's ``build``."""

    def __init__(
        self, mode: str, source: str, columns: int, k: int, by_score: bool, low: bool, wide: bool, forced: bool,
        element: Any, threads: int,
    ):  # fmt: skip
        self.mode, self.source, self.columns = mode, source, columns
        self.k, self.by_score, self.low, self.wide, self.forced = k, by_score, low, wide, forced
        self.element, self.threads = element, threads
        self.owned = mode in ("owner", "split")  # a rank merges a row for the others, or for itself
        self.small = k == RUN
        self.pairs = 0 if self.small else k // (2 * threads)  # that a thread pushes, and takes from each source


def of_row(address: Any, row: Any) -> Any:
    """Scaled in 32 bits: of a loop's row, scaled as an address, the compiler for gfx1250 makes no legal load."""
    return address + fx.Int64(row * fx.Int32(4))


@flyc.jit
def owner_of(comm: Any, a: Arguments) -> Any:
    owner = a.row % fx.Int32(comm.world)
    if a.owners != fx.Int64(0):
        owner = load_element(of_row(a.owners, a.row), fx.Int32)
    return owner


def _clamped(value: Any, limit: Any) -> Any:
    value = (value < limit).select(value, limit)
    return (value > fx.Int32(0)).select(value, fx.Int32(0))


def _local(comm: Any, a: Arguments, length: Any) -> Any:
    """``local_length`` by unsigned divisions, which take half the time: scores are loaded only when it is known."""
    return fx.Int32(local_length(*(fx.Uint32(one) for one in (length, comm.rank, comm.world, a.granule))))


@flyc.jit
def _range(comm: Any, a: Arguments) -> tuple[Any, Any, Any]:
    """How many columns of the row this rank has, and which of them are not forced: from the first up to the last."""
    length, begin, end = a.columns, fx.Int32(0), a.columns
    if a.lengths != fx.Int64(0):
        length = load_element(of_row(a.lengths, a.row), fx.Int32)
        end = length
        if a.spread != fx.Int32(0):
            visible = (length > fx.Int32(0)).select(length, fx.Int32(0))
            first, last = a.forced
            length = _local(comm, a, visible)
            begin = _local(comm, a, _clamped(first, visible))
            end = _local(comm, a, _clamped(visible - last, visible))
    return _clamped(length, a.columns), begin, end


def open_row(comm: Any, a: Arguments, form: Form) -> tuple[ScoreRow, Any, Any]:
    """The row's scores, and the range of columns that are not forced."""
    address = a.scores + fx.Int64(a.row) * a.stride * fx.Int64(form.element.width // 8)
    length, begin, end = _range(comm, a)
    return ScoreRow(address, form.element, length, form.wide, ID_BITS, form.low), begin, end


def _load(form: Form, row: ScoreRow) -> tuple[list[Any], Any]:
    """Of a row that fits registers, this thread's places and what it loads there."""
    units = max(1, form.columns // (form.threads * row.per_unit))
    at = [fx.Int32(fx.thread_idx.x) + fx.Int32(j * form.threads) for j in range(units)]
    return at, load_units(row, at)


def _few(form: Form, row: ScoreRow, loaded: Any, at: list[Any], begin: Any, end: Any) -> list[tuple[Any, Any]]:
    """The same as elements of ``nominate_few``; those that are forced have the greatest key."""
    elements = elements_of(row, loaded, at)
    if not form.forced:
        return elements
    rest = [(key == fx.Uint32(0)) | ((index >= begin) & (index < end)) for key, index in elements]
    return [(one.select(key, fx.Uint32(PINNED)), index) for one, (key, index) in zip(rest, elements, strict=True)]


def _ranks(form: Form, row: ScoreRow, loaded: Any, at: list[Any], begin: Any, end: Any) -> list[Any]:
    ranks = ranks_of(row, loaded, at)
    return [pin(rank, begin, end, form.low) for rank in ranks] if form.forced else ranks


def _fold(form: Form, row: ScoreRow, begin: Any, end: Any) -> Fold:
    """Of a row that does not."""
    fold = fold_row(row, form.threads, _IN_FLIGHT)
    return pinned(fold, begin, end, form.low) if form.forced else fold


def _given(a: Arguments) -> tuple[Any, Any]:
    """Addresses of the row's scores and ids that another kernel has found."""
    begin = fx.Int64(a.row) * a.stride * fx.Int64(4)
    return a.scores + begin, a.ids + begin


def nominate_row(comm: Any, a: Arguments, form: Form, chosen: Any, scratch: Scratch) -> Any:
    """The row's local best into ``chosen``, as ``_topk_exchange_meet.push_row`` takes them; how many."""
    if form.source == "candidates":
        load_nominated(comm, *_given(a), a.k, form.k, chosen, a.granule, form.low, scratch, form.threads)
        return fx.Uint32(form.k)
    row, begin, end = open_row(comm, a, form)
    need = fx.Uint32((a.k < row.length).select(a.k, row.length))
    if form.columns:
        at, loaded = _load(form, row)
        if form.small:
            elements = _few(form, row, loaded, at, begin, end)
            return nominate_few(elements, need, chosen, form.low, scratch, form.threads)
        clear(scratch, form.threads)
        fx.gpu.barrier()
        fold = fold_ranks(_ranks(form, row, loaded, at, begin, end))
    else:
        clear(scratch, form.threads)
        fx.gpu.barrier()
        fold = _fold(form, row, begin, end)
    return nominate(fold, fx.Uint32(row.length), need, form.k, chosen, scratch, form.threads, None)


@flyc.jit
def _settled(comm: Any, a: Arguments, low: bool, floor: Any, rank: Any) -> Any:
    """The rank with its global id, or 0 for one below ``floor``: an id costs two divisions."""
    settled = fx.Uint64(0)
    if (rank >= floor) & (rank != fx.Uint64(0)):
        settled = global_rank(comm, rank, a.granule, low)
    return settled


def elements(comm: Any, a: Arguments, form: Form) -> tuple[Fold, Callable[[Any], Fold]]:
    """All that this rank has of the row, for ``threshold.find_threshold``: a fold whose ranks are right in their
    scores, and, of all not below a floor, one with global ids."""
    if form.source == "scores" and not form.columns:
        rough = _fold(form, *open_row(comm, a, form))
        return (
            rough,
            lambda floor: (
                lambda step, state: rough(
                    lambda rank, so_far: step(_settled(comm, a, form.low, floor, rank), so_far), state
                )
            ),
        )
    if form.source == "candidates":
        at = [fx.Int32(fx.thread_idx.x) + fx.Int32(j * form.threads) for j in range(max(1, form.k // form.threads))]
        ranks = given_ranks(*_given(a), at, a.k, form.low)
    else:
        row, begin, end = open_row(comm, a, form)
        at, loaded = _load(form, row)
        ranks = _ranks(form, row, loaded, at, begin, end)
    fold = fold_ranks([_settled(comm, a, form.low, fx.Uint64(0), rank) for rank in ranks])
    return fold, lambda floor: fold
