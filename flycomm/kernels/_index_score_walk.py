# SPDX-License-Identifier: Apache-2.0
"""Which steps of which request's keys a block of ``index_scores`` scores, and the loops over them."""

from collections.abc import Callable
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.kernels._index_score_task import Task, longest
from flycomm.primitives.block_scan import read, write
from flycomm.primitives.index_score import BLOCK, Emit, score_tokens
from flycomm.primitives.index_score_blocks import BlockRows, add_tile, least, score_block
from flycomm.primitives.index_score_keys import Keys
from flycomm.primitives.index_score_query import stage
from flycomm.primitives.index_score_warpgroup import GroupKeys, score_group
from flycomm.primitives.index_score_warpgroup_query import GroupQuery


def _least(a: Any, b: Any) -> Any:
    return (a < b).select(a, b)


def _keys(task: Task, table: Any, length: Any) -> Keys:
    if isinstance(task.query, GroupQuery):
        return GroupKeys(task.cache, table, length)
    return Keys(task.cache, task.query.form, table, length)


def _pages(keys: Keys, first: Any, scaled: bool) -> list[Any]:
    return keys.pages(first, scaled)


def _load(keys: Keys, pages: Any, first: Any, scaled: bool) -> list[list[Any]]:
    return keys.load(pages, first, scaled)


def _operands(keys: Keys, loaded: Any) -> tuple[list[list[Any]], list[Any]]:
    """Of every tile, and the scales after them."""
    tiles = keys.tiles
    return [keys.operands(tile) for tile in loaded[:tiles]], [one for extra in loaded[tiles:] for one in extra]


def _score(task: Task, keys: Keys, operands: Any, scales: Any, key: Any, count: Any, emit: Emit) -> None:
    score = score_group if isinstance(keys, GroupKeys) else score_tokens
    score(task.query, operands, scales, key, count, emit)


def _emit(task: Task, first: Any) -> Emit:
    return task.sink(first)


def _stage(task: Task, first: Any, count: Any) -> None:
    """While the first keys are on their way."""
    stage(task.query, task.queries, task.weights, task.lengths, first, count, task.most)


@flyc.jit
def _tokens(task: Task, keys: Keys, begin: Any, end: Any, first: Any, count: Any, group: Any) -> None:
    """This group's steps from ``begin`` to ``end``. The next one's keys are on their way, and the pages after that.

    Past the last step that one is loaded again: no branch comes between loads and what they overlap with.
    """
    width, stride, last = fx.Int32(task.unit), fx.Int32(task.groups), end - fx.Int32(1)
    step = begin + group
    start, following = _least(step, last) * width, _least(step + stride, last)
    loaded = _load(keys, _pages(keys, start, True), start, True)
    pages = _pages(keys, following * width, True)
    _stage(task, first, count)
    while step < end:
        operands, scales = _operands(keys, loaded)
        loaded = _load(keys, pages, following * width, True)
        following = _least(following + stride, last)
        pages = _pages(keys, following * width, True)
        _score(task, keys, operands, scales, step * width, count, _emit(task, first))
        step = step + stride


def _add_step(
    task: Task, keys: Keys, rows: BlockRows, loaded: Any, key: Any, best: Any, pages: Any, following: Any
) -> tuple[list[list[Any]], list[Any]]:
    """Tile by tile: multiply what is there, and load the step at key ``following`` to its place."""
    ahead = []
    a = [task.query.operands(fx.Int32(tile)) for tile in range(task.query.tiles)]
    for tile, mine in enumerate(loaded):
        first = key + fx.Int32(tile * task.query.form.columns)
        best = add_tile(task.query, rows, a, keys.operands(mine), first, task.scale, best)
        ahead.append(keys.load_tile(pages, following, tile))
    return ahead, best


@flyc.jit
def _blocks(task: Task, keys: Keys, begin: Any, end: Any, first: Any, count: Any, group: Any) -> None:
    """The same by blocks of several steps; a block lies in one page."""
    query = task.query
    unit, width, stride, last = fx.Int32(BLOCK), fx.Int32(query.form.lanes), fx.Int32(task.groups), end - fx.Int32(1)
    block = begin + group
    start = _least(block, last) * unit
    pages = _pages(keys, start, False)
    loaded = _load(keys, pages, start, False)
    _stage(task, first, count)
    rows = BlockRows(query, count)
    while block < end:
        following = _least(block + stride, last) * unit
        pages_after = _pages(keys, following, False)
        best, key = least(query), block * unit
        while key < (block + fx.Int32(1)) * unit:
            ahead = key + width
            inside = ahead < (block + fx.Int32(1)) * unit
            page = [inside.select(pages[0], pages_after[0])]
            loaded, best = _add_step(task, keys, rows, loaded, key, best, page, inside.select(ahead, following))
            key = ahead
        score_block(query, rows, best, block, _emit(task, first * fx.Int32(query.heads)))
        block, pages = block + stride, pages_after


@flyc.jit
def _share(task: Task, request: Any, length: Any, begin: Any, end: Any) -> None:
    """Units ``begin`` to ``end`` of a request, for all its rows."""
    query = task.query
    group = fx.Int32(fx.thread_idx.x) // fx.Int32(query.group)
    table = task.block_table + fx.Int64(request) * fx.Int64(task.table_stride) * fx.Int64(4)
    keys = _keys(task, table, length)
    first, left = task.number(task.first_row, request), task.number(task.row_count, request)
    while left > fx.Int32(0):
        count = (left < fx.Int32(query.rows)).select(left, fx.Int32(query.rows))
        if fx.const_expr(task.kind == "dsa"):
            _tokens(task, keys, begin, end, first, count, group)
        else:
            _blocks(task, keys, begin, end, first, count, group)
        first, left = first + count, left - count


@flyc.jit
def each_share(task: Task, totals: Any, requests: Any, blocks: int) -> None:
    """Called by every thread: scores this block's run of all requests' units, one request after the other.

    ``totals``: shared memory for ``MAX_REQUESTS`` i32. Contains block barriers.
    """
    request = fx.Int32(fx.thread_idx.x) // fx.Int32(task.query.form.lanes)
    while request < requests:
        write(totals, request, longest(task, request))  # the same from every lane
        request = request + fx.Int32(task.query.threads // task.query.form.lanes)
    fx.gpu.barrier()
    each_run(task, totals, requests, blocks, _share)


@flyc.jit
def each_run(task: Task, totals: Any, requests: Any, blocks: int, body: Callable[..., None]) -> None:
    """``body(task, request, length, begin, end)``, i32, of every request of which this block has units: which ones.

    After :func:`each_share`, with its ``totals``, or in it. Every thread of the block calls it, and the body.
    """
    unit = fx.Int32(task.unit)
    whole, request = fx.Int32(0), fx.Int32(0)
    while request < requests:
        whole = whole + (read(totals, request, fx.Int32) + unit - fx.Int32(1)) // unit
        request = request + fx.Int32(1)
    block = fx.Int64(fx.block_idx.x)
    begin = fx.Int32(fx.Int64(whole) * block // fx.Int64(blocks))
    end = fx.Int32(fx.Int64(whole) * (block + fx.Int64(1)) // fx.Int64(blocks))
    before, request = fx.Int32(0), fx.Int32(0)
    while (request < requests) & (before < end):
        length = read(totals, request, fx.Int32)
        units = (length + unit - fx.Int32(1)) // unit
        low = (begin > before).select(begin - before, fx.Int32(0))
        high = (end - before < units).select(end - before, units)
        if low < high:
            body(task, request, length, low, high)
        before = before + units
        request = request + fx.Int32(1)
