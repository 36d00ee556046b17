# SPDX-License-Identifier: Apache-2.0
"""Index queries in shared memory as B of the tile product of four warps: :mod:`flycomm.primitives.warpgroup`."""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.channel import FRAGMENT_BYTES
from flycomm.primitives import matrix, warpgroup
from flycomm.primitives.access import load_fragment
from flycomm.primitives.block_scan import write
from flycomm.primitives.index_score_keys import Format
from flycomm.primitives.index_score_query import Query
from flycomm.primitives.warpgroup import ALIGNMENT, MOST_COLUMNS, ROW_BYTES, ROWS, SEGMENTS, THREADS

_SHARED = fx.AddressSpace.Shared
SIXTEEN = 16  # heads of whose weights a lane loads four at a time


def rows_at_once(heads: int, rows: int) -> int:
    """Query rows of one product: a power of two, or 0 if ``heads`` are too many."""
    fit = min(rows, MOST_COLUMNS // heads)
    return 1 << fit.bit_length() - 1 if fit else 0


class GroupQuery(Query):
    """Queries as columns of the product, weights in the order of a lane's results. For warps of 32 lanes."""

    alignment = ALIGNMENT

    def __init__(self, shared: Any, fmt: Format, heads: int, rows: int, threads: int):
        self.at_once = rows_at_once(heads, rows)
        rows = -(-rows // self.at_once) * self.at_once
        super().__init__(shared, fmt, matrix.WARP, heads, rows, threads)
        self.group, self.step = THREADS, ROWS

    def words(self) -> Any:
        """A pointer to the queries, as u32."""
        return fx.recast_iter(fx.PointerType.get(fx.Uint32.ir_type, _SHARED, 4), self.fragments)

    def stage_fragments(self, queries: Any, count: Any) -> None:
        """All loads first: they overlap."""
        last = count * fx.Int32(self.heads) - fx.Int32(1)
        fragments = self.rows * self.heads * (ROW_BYTES // FRAGMENT_BYTES)
        indices = [fx.Int32(fx.thread_idx.x) + fx.Int32(i * self.threads) for i in range(-(-fragments // self.threads))]
        _stage(self, queries, indices, [self._load(queries, index, last) for index in indices], last, fragments)

    def _load(self, queries: Any, index: Any, last: Any) -> Any:
        row = index // fx.Int32(ROW_BYTES // FRAGMENT_BYTES)
        index = (row > last).select(fx.Int32(0), index)
        return load_fragment(queries + fx.Int64(index) * fx.Int64(FRAGMENT_BYTES), fx.Uint32)

    def store_weight(self, index: Any, weight: Any) -> None:
        """In the order in which lanes read them, and half of it: what it is multiplied by is twice relu."""
        head = index % fx.Int32(SIXTEEN)
        eight, quarter, two = head // fx.Int32(8), head % fx.Int32(8) // fx.Int32(2), head % fx.Int32(2)
        place = index - head + quarter * fx.Int32(4) + eight * fx.Int32(2) + two
        write(self.weights, place, weight * fx.Float32(0.5))

    def weights_of(self, first: Any) -> Any:
        """Half of this lane's four of the 16 from row × head ``first`` (i32, a multiple of 16) on."""
        place = self.weights + first + self.form.quarter(self.form.lane()) * fx.Int32(4)
        wide = fx.recast_iter(fx.PointerType.get(fx.Float32.ir_type, _SHARED, FRAGMENT_BYTES), place)
        return fx.generic_load(wide, dtype=fx.Float32, count=4)


@flyc.jit
def _stage(q: GroupQuery, queries: Any, indices: Any, values: Any, last: Any, fragments: int) -> None:
    for i in fx.range_constexpr(len(indices)):
        if indices[i] < fx.Int32(fragments):
            _store(q, indices[i], values[i], last)
    warpgroup.publish_operand()


def _store(q: GroupQuery, index: Any, value: Any, last: Any) -> None:
    row, rest = index // fx.Int32(matrix.QUARTERS * SEGMENTS), index % fx.Int32(matrix.QUARTERS * SEGMENTS)
    segment, quarter = rest // fx.Int32(matrix.QUARTERS), rest % fx.Int32(matrix.QUARTERS)
    for word in range(4):
        there = warpgroup.place(row, segment, quarter, fx.Int32(word)) // fx.Int32(4)
        fx.generic_store(q.words() + there, (row > last).select(fx.Uint32(0), fx.Uint32(value[word])))
