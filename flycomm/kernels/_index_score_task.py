# SPDX-License-Identifier: Apache-2.0
"""What a launch that scores index keys is given, and where its scores go."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives.access import load_element, store_element
from flycomm.primitives.index_score import BLOCK, Emit
from flycomm.primitives.index_score_keys import Cache
from flycomm.primitives.index_score_query import Query, seen
from flycomm.primitives.norm import fold_lanes

MAX_REQUESTS = 256
Sink = Callable[[Any], Emit]
"""``sink(first)`` takes scores of rows (of block_max: rows × heads) that count from row ``first`` (i32)."""


@dataclass(frozen=True)
class Task:
    """Trace-time only. Addresses (i64), as ``index_scores`` documents them; ``columns``, ``table_stride``: i32.

    ``sink`` is what a kernel of its own puts in place of :func:`store`: scores in registers, before they are anywhere.
    """

    kind: str
    query: Query
    cache: Cache
    queries: Any
    weights: Any
    block_table: Any
    first_row: Any
    row_count: Any
    lengths: Any
    table_stride: Any
    columns: Any
    scale: Any
    sink: Sink

    @property
    def unit(self) -> int:
        """Keys that a group of lanes takes at a time."""
        return BLOCK if self.kind == "block_max" else self.query.step

    @property
    def groups(self) -> int:
        """Of lanes, in a block: each takes units of its own."""
        return self.query.threads // self.query.group

    @property
    def most(self) -> Any:
        """Keys (i32) for which the output has columns."""
        return self.columns * fx.Int32(BLOCK) if self.kind == "block_max" else self.columns

    def number(self, address: Any, i: Any) -> Any:
        return load_element(address + fx.Int64(i) * fx.Int64(4), fx.Int32)


@flyc.jit
def _store(address: Any, value: Any, condition: Any) -> None:
    if condition:
        store_element(address, value)


def store(out: Any, out_stride: Any) -> Sink:
    """Into the plane of f32 at ``out`` (i64), rows ``out_stride`` (i64) elements apart."""

    def sink(first: Any) -> Emit:
        def emit(row: Any, column: Any, score: Any, inside: Any) -> None:
            place = fx.Int64(first + row) * out_stride + fx.Int64(column)
            _store(out + place * fx.Int64(4), score, inside)

        return emit

    return sink


def _greatest(a: Any, b: Any) -> Any:
    return (a > b).select(a, b)


@flyc.jit
def longest(task: Task, request: Any) -> Any:
    """How many keys the request's rows see at most: a row for each lane of a group, all of which get it."""
    first, count = task.number(task.first_row, request), task.number(task.row_count, request)
    form = task.query.form
    most, row = fx.Int32(0), form.lane()
    while row < count:
        most = _greatest(most, seen(task.lengths, first + row, task.most))
        row = row + fx.Int32(form.lanes)
    return fold_lanes(most, form.lanes, _greatest)
