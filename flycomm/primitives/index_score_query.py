# SPDX-License-Identifier: Apache-2.0
"""Index queries of a few rows of one request, in a block's shared memory as operands of a tile product."""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.channel import FRAGMENT_BYTES
from flycomm.primitives import matrix
from flycomm.primitives.access import load_element, load_fragment
from flycomm.primitives.block_scan import read, write
from flycomm.primitives.index_score_keys import Format

_SHARED = fx.AddressSpace.Shared


class Query:
    """Up to ``rows`` query rows of ``heads`` index heads each. Trace-time only; allocates from the kernel's ``shared``.

    The rows × heads are the rows of ``tiles`` tiles, padded with zeros. ``threads``: of the block, of which ``group``
    score a step of ``step`` keys together; ``alignment``: of the queries, in bytes.
    """

    alignment = FRAGMENT_BYTES

    def __init__(self, shared: Any, fmt: Format, form: matrix.Layout, heads: int, rows: int, threads: int):
        self.group = self.step = form.lanes
        self.fmt, self.form, self.heads, self.rows, self.threads = fmt, form, heads, rows, threads
        self.tiles = -(-rows * heads // matrix.ROWS)
        self.fragments = shared.allocate(self.tiles * matrix.ROWS * fmt.query_bytes, self.alignment).peek().ptr
        weights = shared.allocate(rows * heads * 4, FRAGMENT_BYTES).peek().ptr
        self.weights = fx.recast_iter(fx.PointerType.get(fx.Float32.ir_type, _SHARED, 4), weights)
        self.lengths = shared.allocate(fx.Array[fx.Int32, rows]).peek().ptr

    def at(self, index: Any) -> Any:
        """A pointer to fragment ``index`` (i32)."""
        place = self.fragments + index * fx.Int32(FRAGMENT_BYTES)
        return fx.recast_iter(fx.PointerType.get(fx.Uint32.ir_type, _SHARED, FRAGMENT_BYTES), place)

    def room(self, dtype: Any, count: int) -> Any:
        """The queries' place, for ``count`` elements of ``dtype`` when nobody scores any more; None if it is too small.

        A block barrier lies between the last use of the one and the first of the other.
        """
        if self.tiles * matrix.ROWS * self.fmt.query_bytes < count * dtype.width // 8:
            return None
        return fx.recast_iter(fx.PointerType.get(dtype.ir_type, _SHARED, dtype.width // 8), self.fragments)

    def operands(self, tile: Any) -> list[list[Any]]:
        """Of ``tile`` (i32), ``[segment][part]``: the A of :func:`flycomm.primitives.matrix.multiply`."""
        parts = self.form.parts
        first = tile * fx.Int32(self.fmt.segments * parts * self.form.lanes) + self.form.lane()

        def load(i: int) -> Any:
            fragment = fx.generic_load(self.at(first + fx.Int32(i * self.form.lanes)), dtype=fx.Uint32, count=4)
            return matrix.prepare(self.fmt.element, fragment)

        return [[load(segment * parts + part) for part in range(parts)] for segment in range(self.fmt.segments)]

    def weight(self, index: Any) -> Any:
        """Of row × head ``index`` (i32)."""
        return read(self.weights, index, fx.Float32)

    def store_weight(self, index: Any, weight: Any) -> None:
        """Keep that of row × head ``index`` (i32)."""
        write(self.weights, index, weight)

    def stage_fragments(self, queries: Any, count: Any) -> None:
        """This thread's part of ``count`` (i32) rows at address ``queries`` (i64); zeros for the rows that remain."""
        _stage_fragments(self, queries, count)

    def length(self, row: Any) -> Any:
        """Keys (i32) that a staged row sees; 0 for one that was not staged."""
        return read(self.lengths, row, fx.Int32)


def stage(q: Query, queries: Any, weights: Any, lengths: Any, first: Any, count: Any, most: Any) -> None:
    """Bring ``count`` (i32) rows from row ``first`` (i32) on: called by the whole block; contains two barriers.

    ``queries`` (rows, heads, 128), ``weights`` (rows, heads) f32 or 0, ``lengths`` (rows,) i32: addresses, of rows
    side by side. Lengths are cut to 0 … ``most`` (i32). Before the first barrier nobody may still use what was
    staged before, after the second everybody may use this.
    """
    fx.gpu.barrier()
    q.stage_fragments(queries + fx.Int64(first) * fx.Int64(q.heads * q.fmt.query_bytes), count)
    _stage_numbers(q, weights, lengths, first, count, most)
    fx.gpu.barrier()


def _source(q: Query, index: Any) -> tuple[Any, Any]:
    """Row × head and byte within it of what lies at fragment ``index``: lane by lane, for loads without conflicts."""
    lanes, parts, segments = (fx.Int32(one) for one in (q.form.lanes, q.form.parts, q.fmt.segments))
    lane, rest = index % lanes, index // lanes
    part, rest = rest % parts, rest // parts
    row = rest // segments * fx.Int32(matrix.ROWS) + part * fx.Int32(q.form.columns) + q.form.column(lane)
    return row, q.fmt.query_place(rest % segments, q.form.quarter(lane))


def _store(q: Query, index: Any, value: Any) -> None:
    fx.generic_store(q.at(index), value)


@flyc.jit
def _stage_fragments(q: Query, queries: Any, count: Any) -> None:
    index = fx.Int32(fx.thread_idx.x)
    while index < fx.Int32(q.tiles * matrix.ROWS * q.fmt.query_bytes // FRAGMENT_BYTES):
        row, place = _source(q, index)
        value = fx.Vector.filled(4, 0, fx.Uint32)
        if row < count * fx.Int32(q.heads):
            begin = queries + fx.Int64(row) * fx.Int64(q.fmt.query_bytes)
            value = load_fragment(begin + fx.Int64(place), fx.Uint32)
        _store(q, index, value)
        index = index + fx.Int32(q.threads)


def _store_weight(q: Query, index: Any, weight: Any) -> None:
    q.store_weight(index, weight)


@flyc.jit
def _stage_numbers(q: Query, weights: Any, lengths: Any, first: Any, count: Any, most: Any) -> None:
    index = fx.Int32(fx.thread_idx.x)
    while index < fx.Int32(q.rows * q.heads):
        row = index // fx.Int32(q.heads)
        there = row < count
        weight, length = fx.Float32(0.0), fx.Int32(0)
        if there & (weights != fx.Int64(0)):
            place = fx.Int64(first) * fx.Int64(q.heads) + fx.Int64(index)
            weight = load_element(weights + place * fx.Int64(4), fx.Float32)
        _store_weight(q, index, weight)
        if index % fx.Int32(q.heads) == fx.Int32(0):
            if there:
                length = seen(lengths, first + row, most)
            write(q.lengths, row, length)
        index = index + fx.Int32(q.threads)


def seen(lengths: Any, row: Any, most: Any) -> Any:
    """``lengths[row]`` (i32 at an address), cut to 0 … ``most``."""
    length = load_element(lengths + fx.Int64(row) * fx.Int64(4), fx.Int32)
    length = (length < most).select(length, most)
    return (length > fx.Int32(0)).select(length, fx.Int32(0))
