# SPDX-License-Identifier: Apache-2.0
"""An indexer's scores of all cached keys (of this rank's share) for a step's query rows, into a plane of f32.

``"dsa"``        score[row, key] = k_scale[key] · Σ_h weights[row, h] · relu(q[row, h] · k[key])
``"block_max"``  score[row · heads + h, block] = max over the block's 128 keys of (q[row, h] · k[key]) · scale

The pass is bound by reading keys until there are many rows. So a group of lanes loads a step of keys once for all rows
of a request (up to ``rows`` of them; more take another pass), the next step's loads are on their way meanwhile, and
each block has one run of the keys of all requests together: the same number of steps for every block, whatever the
lengths. Groups of a block take neighbouring steps. Queries wait in shared memory.

Keys at or beyond a row's length are neither scored nor stored, those beyond the length of all rows of the request not
read, nor their pages' entries. No score's bits depend on the grid, on the pages or on which rank scores
(:mod:`flycomm.primitives.index_score`), so shares of a context are together what one rank would have made of it.

Bounds, a key, on an H200: 4.8 TB/s, and 989 TFLOPS in bf16 and f16, of which ``mma.sync`` gets some 60 %; e4m3 is
multiplied as f16 there. The DSA of 64 heads reads 132 bytes, 27 ps, and computes 16 Ki operations for each query row,
27 ps: memory is at most all busy with one row and a quarter with four. 32 heads: half of that, so half busy with four.
``math`` "fp8" (``wgmma``) multiplies e4m3 as it is, at 1979 TFLOPS, 8 ps a row; other units meanwhile add up the heads
of other keys in nearly as long. So memory is at most four fifths busy with four rows.
Block-max of 4 heads × 4 rows is a single tile of rows: 256 bytes, 53 ps, and 4 Ki operations, 7 ps.

Arguments of a launch: ``(queries, weights, cache, block_table, first_row, row_count, lengths, out, requests,
table_stride, page_first, page_step, columns, page_stride, token_stride, scale_offset, out_stride, scale, stream)``.
``queries``: (rows, heads, 128) in the type that ``primitives/index_score_keys`` says for the cache, aligned to 16
bytes; ``weights``: f32 (rows, heads), for block_max 0. ``cache``, its strides (i64, bytes; pages, and the keys in them,
aligned to 16) and pages: see there; ``block_table``: i32, rows ``table_stride`` (i32) entries apart. ``first_row``,
``row_count``: i32 (requests,), ``lengths``: i32 (rows,), how many keys of this rank's share a row sees. ``out``: f32,
rows ``out_stride`` (i64) elements apart, of ``columns`` (i32) columns: keys or blocks; what does not fit in is left
out. ``scale`` is f32, of block_max; e4m3 caches have a scale plane in dsa only. ``requests`` is at most
:data:`MAX_REQUESTS`. May be captured, and replayed with other lengths; needs nothing zeroed.
"""

from collections.abc import Callable, Sequence
from functools import cache as cached
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.errors import UsageError
from flycomm.kernels._index_score_scorer import (
    KINDS,
    MATH,
    Scorer,
    best_threads,
    check_threads,
    most_rows,
    query_dtype,
    scales,
    sums_fp8,
)
from flycomm.kernels._index_score_task import MAX_REQUESTS, Task, store
from flycomm.kernels._index_score_walk import each_share
from flycomm.kernels._launch import null_pointer
from flycomm.kernels._specialization import Specialization
from flycomm.primitives import matrix
from flycomm.primitives.index_score_keys import FORMATS, Cache
from flycomm.primitives.index_score_query import Query
from flycomm.primitives.index_score_warpgroup_query import GroupQuery

__all__ = [
    "KINDS",
    "MATH",
    "MAX_REQUESTS",
    "Scorer",
    "best_threads",
    "check_threads",
    "each_share",
    "most_rows",
    "query_dtype",
    "scales",
    "specialization",
    "sums_fp8",
    "task_of",
]


def specialization(scorer: Scorer, blocks: int, threads: int) -> Specialization:
    """``blocks``: one for each multiprocessor; ``threads``: a multiple of 64, best :func:`best_threads`."""
    if blocks < 1 or threads < 64 or threads % 64:
        raise UsageError(f"a grid of {blocks} × {threads} scores nothing; use 1 block or more, of a multiple of 64")
    check_threads(scorer, threads)
    return Specialization(scorer.name, build(scorer), 1, "", blocks, threads)


def task_of(
    scorer: Scorer,
    shared: Any,
    threads: int,
    pointers: Sequence[Any],
    table_stride: Any,
    page_first: Any,
    page_step: Any,
    columns: Any,
    strides: tuple[Any, Any, Any],
    out_stride: Any,
    scale: Any,
) -> Task:
    """What :func:`each_share` does in a kernel with these arguments. Allocates from the kernel's ``shared``.

    ``pointers``: the first eight arguments; ``strides``: of the cache's pages and tokens, and where scales begin.
    """
    fmt = FORMATS[scorer.cache]
    if scorer.math == "fp8":
        query: Query = GroupQuery(shared, fmt, scorer.heads, scorer.rows, threads)
    else:
        query = Query(shared, fmt, matrix.layout(), scorer.heads, scorer.rows, threads)
    q, w, keys, table, first, count, seen, plane = (fx.Int64(fx.ptrtoint(pointer)) for pointer in pointers)
    pages = Cache(fmt, keys, scorer.page, *strides, page_first, page_step)
    given = (q, w, table, first, count, seen, table_stride, columns, scale)
    return Task(scorer.kind, query, pages, *given, store(plane, out_stride))


@cached
def build(scorer: Scorer) -> Callable[..., tuple[Any, tuple[Any, ...]]]:
    """``build`` of a :class:`Specialization`."""

    def build_one(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
        return _build(scorer, blocks, threads)

    return build_one


def _build(scorer: Scorer, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
    @flyc.kernel(name=f"index_scores_{scorer.kind}", known_block_size=[threads, 1, 1])
    def index_scores(
        queries: fx.Pointer, weights: fx.Pointer, cache: fx.Pointer, block_table: fx.Pointer, first_row: fx.Pointer,
        row_count: fx.Pointer, lengths: fx.Pointer, out: fx.Pointer, requests: fx.Int32, table_stride: fx.Int32,
        page_first: fx.Int32, page_step: fx.Int32, columns: fx.Int32, page_stride: fx.Int64, token_stride: fx.Int64,
        scale_offset: fx.Int64, out_stride: fx.Int64, scale: fx.Float32,
    ):  # fmt: skip
        shared = fx.SharedAllocator()
        pointers = (queries, weights, cache, block_table, first_row, row_count, lengths, out)
        strides = (page_stride, token_stride, scale_offset)
        task = task_of(
            scorer, shared, threads, pointers, table_stride, page_first, page_step, columns, strides, out_stride, scale
        )
        totals = shared.allocate(fx.Array[fx.Int32, MAX_REQUESTS]).peek().ptr
        each_share(task, totals, requests, blocks)

    @flyc.jit
    def launch(
        queries: fx.Pointer, weights: fx.Pointer, cache: fx.Pointer, block_table: fx.Pointer, first_row: fx.Pointer,
        row_count: fx.Pointer, lengths: fx.Pointer, out: fx.Pointer, requests: fx.Int32, table_stride: fx.Int32,
        page_first: fx.Int32, page_step: fx.Int32, columns: fx.Int32, page_stride: fx.Int64, token_stride: fx.Int64,
        scale_offset: fx.Int64, out_stride: fx.Int64, scale: fx.Float32, stream: fx.Stream,
    ):  # fmt: skip
        index_scores(
            queries, weights, cache, block_table, first_row, row_count, lengths, out, requests, table_stride,
            page_first, page_step, columns, page_stride, token_stride, scale_offset, out_stride, scale,
        ).launch(grid=(blocks,), block=(threads,), stream=stream)  # fmt: skip

    return launch, (*[null_pointer(fx.Uint8, 1)] * 8, *[1] * 9, 1.0, fx.Stream(None))
