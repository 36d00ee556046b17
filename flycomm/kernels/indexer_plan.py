# SPDX-License-Identifier: Apache-2.0
"""What a step's query rows see, and which share of it is this rank's: one launch a step, a thread a row or request.

Row ``j`` of a request of ``len`` tokens with ``qlen`` query rows sees the tokens ``[0, len - qlen + j + 1)``; a key is
``block`` tokens, and the last one that a row sees may be cut. Lengths below 0 count as 0, those over ``most`` tokens as
that. Rows that belong to no request see nothing.

Arguments of a launch: ``(seq_lens, queries, owners, out, pinned, rows, requests, qlen, most, rank, world, granule,
block, page, me, grid, stream)``. ``seq_lens``: i32 (requests,). ``queries``: i32 (requests + 1,) first rows, and their
end, if the kernel is ragged; else 0, and every request has ``qlen`` rows. ``owners``: i32 (rows × lists), or 0; then a
list that is not ``me``'s has no keys here. ``rank``, ``world``, ``granule`` (tokens): of the shard; ``page``: tokens a
page. ``grid``: blocks, of a thread for each row and for each request.

``out``: i32, the parts of :func:`sections` one after the other. ``pinned``: i64 (rows × lists, forced), or 0: the keys
among the first and the last that are forced, inside what a list sees; 0 where it sees nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.kernels._launch import null_pointer
from flycomm.kernels._specialization import Specialization
from flycomm.primitives.access import load_element, store_element
from flycomm.primitives.shard import local_length

THREADS = 64


def sections(rows: int, requests: int, lists: int) -> dict[str, tuple[int, int]]:
    """Name → first word and words, of what a launch writes."""
    sizes = {
        "request_of_row": rows,  # 0 for a row of none
        "visible": rows,  # tokens of the sequence that the row sees
        "share": rows,  # tokens of this rank's that it sees
        "lengths": rows * lists,  # keys of the sequence
        "share_lengths": rows * lists,  # keys of this rank's
        "first_row": requests,
        "row_count": requests,
        "pages": requests,  # of this rank's, that the request's last row sees
    }
    ends = [sum(list(sizes.values())[: n + 1]) for n in range(len(sizes))]
    return {name: (end - size, size) for (name, size), end in zip(sizes.items(), ends, strict=True)}


class _Arguments:
    """A launch's arguments; trace-time only."""

    def __init__(self, pointers: Any, numbers: Any):
        addresses = [fx.Int64(fx.ptrtoint(pointer)) for pointer in pointers]
        self.seq_lens, self.queries, self.owners, self.out, self.pinned = addresses
        self.rows, self.requests, self.qlen, self.most, self.rank, self.world, self.granule = numbers[:7]
        self.block, self.page, self.me = numbers[7:]

    def local(self, tokens: Any, unit: Any) -> Any:
        """How many of the first ``tokens`` keys of ``unit`` tokens, the last perhaps cut, are this rank's."""
        return local_length(_whole(tokens, unit), self.rank, self.world, self.granule // unit)


def _whole(tokens: Any, unit: Any) -> Any:
    return (tokens + unit - fx.Int32(1)) // unit


def _clamp(value: Any, low: Any, high: Any) -> Any:
    value = (value < high).select(value, high)
    return (value > low).select(value, low)


def _load(address: Any, i: Any) -> Any:
    return load_element(address + fx.Int64(i) * fx.Int64(4), fx.Int32)


def _store(address: Any, i: Any, value: Any) -> None:
    store_element(address + fx.Int64(i) * fx.Int64(4), value)


@flyc.jit
def _request_of(a: _Arguments, row: Any) -> Any:
    """The last request whose first row is not beyond ``row``; 0 if there is none."""
    low, high = fx.Int32(0), a.requests
    while low + fx.Int32(1) < high:
        middle = (low + high) // fx.Int32(2)
        below = _load(a.queries, middle) <= row
        low, high = below.select(middle, low), below.select(high, middle)
    return low


def _rows_of(a: _Arguments, request: Any, ragged: bool) -> tuple[Any, Any]:
    """A request's first row, and how many it has."""
    if not ragged:
        return request * a.qlen, a.qlen
    first = _load(a.queries, request)
    return first, _load(a.queries, request + fx.Int32(1)) - first


@flyc.jit
def _is_mine(a: _Arguments, i: Any) -> Any:
    mine = fx.Boolean(True)
    if a.owners != fx.Int64(0):
        mine = _load(a.owners, i) == a.me
    return mine


@flyc.jit
def _row(a: _Arguments, row: Any, lists: int, forced: tuple[int, int], ragged: bool) -> None:
    base = a.out
    used = _load(a.queries, a.requests) if ragged else a.requests * a.qlen
    request, visible = fx.Int32(0), fx.Int32(0)
    if row < used:
        request = _request_of(a, row) if ragged else row // a.qlen
        first, count = _rows_of(a, request, ragged)
        visible = _clamp(_load(a.seq_lens, request) - count + row - first + fx.Int32(1), fx.Int32(0), a.most)
    keys = _whole(visible, a.block)
    mine = a.local(visible, a.block)
    _store(base, row, request)
    _store(base, a.rows + row, visible)
    _store(base, a.rows * fx.Int32(2) + row, a.local(visible, fx.Int32(1)))
    lengths = a.rows * fx.Int32(3)
    last = _clamp(keys - fx.Int32(1), fx.Int32(0), keys)
    for n in fx.range_constexpr(lists):
        i = row * fx.Int32(lists) + fx.Int32(n)
        _store(base, lengths + i, keys)
        _store(base, lengths + a.rows * fx.Int32(lists) + i, _is_mine(a, i).select(mine, fx.Int32(0)))
        if a.pinned != fx.Int64(0):
            for m in fx.range_constexpr(sum(forced)):
                key = fx.Int32(m) if m < forced[0] else keys - fx.Int32(sum(forced) - m)
                place = fx.Int64(i) * fx.Int64(sum(forced)) + fx.Int64(m)
                store_element(a.pinned + place * fx.Int64(8), fx.Int64(_clamp(key, fx.Int32(0), last)))


@flyc.jit
def _request(a: _Arguments, request: Any, lists: int, ragged: bool) -> None:
    first, count = _rows_of(a, request, ragged)
    length = _clamp(_load(a.seq_lens, request), fx.Int32(0), a.most)
    begin = a.rows * fx.Int32(3 + 2 * lists)
    first = _clamp(first, fx.Int32(0), a.rows)
    _store(a.out, begin + request, first)
    _store(a.out, begin + a.requests + request, _clamp(count, fx.Int32(0), a.rows - first))
    _store(a.out, begin + a.requests * fx.Int32(2) + request, _whole(a.local(length, fx.Int32(1)), a.page))


@cache
def build(lists: int, forced: tuple[int, int], ragged: bool) -> Callable[..., tuple[Any, tuple[Any, ...]]]:
    """``build`` of a :class:`Specialization`; ``lists``: selections a row makes; ``forced``: first and last keys."""

    def build_one(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
        @flyc.kernel(name="indexer_plan", known_block_size=[threads, 1, 1])
        def plan(
            seq_lens: fx.Pointer, queries: fx.Pointer, owners: fx.Pointer, out: fx.Pointer, pinned: fx.Pointer,
            rows: fx.Int32, requests: fx.Int32, qlen: fx.Int32, most: fx.Int32, rank: fx.Int32, ranks: fx.Int32,
            granule: fx.Int32, block: fx.Int32, page: fx.Int32, me: fx.Int32,
        ):  # fmt: skip
            numbers = (rows, requests, qlen, most, rank, ranks, granule, block, page, me)
            a = _Arguments((seq_lens, queries, owners, out, pinned), numbers)
            i = fx.Int32(fx.block_idx.x) * fx.Int32(threads) + fx.Int32(fx.thread_idx.x)
            if i < a.rows:
                _row(a, i, lists, forced, ragged)
            if i < a.requests:
                _request(a, i, lists, ragged)

        @flyc.jit
        def launch(
            seq_lens: fx.Pointer, queries: fx.Pointer, owners: fx.Pointer, out: fx.Pointer, pinned: fx.Pointer,
            rows: fx.Int32, requests: fx.Int32, qlen: fx.Int32, most: fx.Int32, rank: fx.Int32, ranks: fx.Int32,
            granule: fx.Int32, block: fx.Int32, page: fx.Int32, me: fx.Int32, grid: fx.Int32, stream: fx.Stream,
        ):  # fmt: skip
            plan(
                seq_lens, queries, owners, out, pinned, rows, requests, qlen, most, rank, ranks, granule, block, page,
                me,
            ).launch(grid=(grid,), block=(threads,), stream=stream)  # fmt: skip

        return launch, (*[null_pointer(fx.Uint8, 1)] * 5, *[1] * 11, fx.Stream(None))

    return build_one


def specialization(lists: int, forced: tuple[int, int], ragged: bool) -> Specialization:
    """See :func:`build`."""
    name = f"indexer_plan_l{lists}" + (f"_f{forced[0]}_{forced[1]}" if any(forced) else "")
    return Specialization(name + ("_ragged" if ragged else ""), build(lists, forced, ragged), 1, "", 1, THREADS)
