# SPDX-License-Identifier: Apache-2.0
"""A step of a context-parallel indexer, and a projection that fills its waits, in one launch::

    score      every block: its run of this rank's keys, of all requests together; then its ready mark
    list       before that, where one block cannot hold a row: the best of its run of each row
    nominate   the block of a list: the marks of all blocks, then this rank's best k, from the scores, or from the lists
    push       the same block: tagged words to whoever merges the list
    project    every block: round(x @ projection.T), while the words travel
    merge      the block of a list: the words of all peers, the best k of all, ids, scores and counts

The stages are those of ``index_scores`` and ``topk_exchange``, called one after the other, so the bits are those of
``IndexerCP.decode``. List ``i`` (a query row, or one of its index heads) is block ``i``'s on every rank. Only that
block waits: for its device once, with the projection's first weights on their way, and for its peers once. The other
blocks score, mark and project.

Arguments of a launch: ``(comm, tag,`` those of ``index_scores`` from ``queries`` to ``scale``, ``out`` being a plane of
scores that nobody else has meanwhile, with rows that begin at multiples of 16 bytes``, lengths, owners, out_scores,
out_ids, out_counts, x, projection, projected, scratch, lists, k, granule, first, last, rows, stream)``. ``lengths`` to
``out_counts`` and ``k`` to ``last`` are as for ``topk_exchange``, with lengths of global keys. ``x`` (rows, inner),
``projection`` (out, inner), ``projected`` (rows, out): bf16, contiguous, 16-byte aligned. ``scratch``:
:func:`scratch_bytes` of device memory, zeros before the first launch, of this channel alone. ``lists``: 1 to the
channel's blocks; ``rows``: 1 to the layer's. All blocks are resident together.

The channel is this layer's own, with two buffers of :func:`slot_bytes`, zero at first (docs: memory model of
the top-k exchange). Lists of a call that failed are NaN, -1 and -1; the projection is right.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

import flycomm.primitives as fc
from flycomm.errors import UsageError
from flycomm.kernels import _mono_indexer_stages as stages
from flycomm.kernels._index_score_task import MAX_REQUESTS
from flycomm.kernels._launch import null_pointer, peers_placeholder
from flycomm.kernels._mono_indexer_runs import Runs, marks_bytes, room_of, row_bytes
from flycomm.kernels._mono_projection import COLUMNS, Projection
from flycomm.kernels._topk_exchange_meet import parted
from flycomm.kernels._topk_exchange_plan import CLASSES, channel_bytes, plan_of
from flycomm.kernels._topk_exchange_row import Arguments, Form, at_row
from flycomm.kernels.index_scores import Scorer, check_threads, each_share, task_of
from flycomm.primitives import packet, ready
from flycomm.primitives.block_scan import GROUP, Scratch
from flycomm.primitives.merge import RUN
from flycomm.primitives.result import Rule

ROWS = (1, 2, 4, 8, 16)  # classes of query rows
_THREADS = (64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Layer:
    """What is fixed when the kernel is compiled, beside the grid; ``mode`` to ``forced`` as for ``topk_exchange``."""

    scorer: Scorer
    k: int  # class
    columns: int  # keys of a list on one rank: class
    inner: int  # elements of a row of x
    out: int  # of a row of what is projected
    rows: int  # query rows, one of ROWS
    mode: str = "all"
    by_score: bool = True
    low: bool = True
    forced: bool = False

    def check(self, threads: int) -> None:
        """Raise :class:`UsageError` for what the kernel cannot do."""
        check_threads(self.scorer, threads)
        if self.k not in CLASSES or threads not in _THREADS or (self.k > 2 * GROUP and threads > self.k // 2):
            raise UsageError(
                f"a block of {threads} threads for k={self.k}; use one of {_THREADS}, at most k / 2 if k is over "
                f"{2 * GROUP}, and one of {CLASSES} for k"
            )
        if self.rows not in ROWS or min(self.inner, self.out) < 1 or self.inner % 8 or self.out % COLUMNS:
            raise UsageError(
                f"a projection of {self.rows} rows from {self.inner} to {self.out}; rows are one of {ROWS}, the others "
                "multiples of 8: pad them"
            )

    def lists_runs(self, threads: int) -> bool:
        """Whether rows are too long for one block, so that every block lists the best of what it scores."""
        return self.scorer.kind == "dsa" and plan_of(self.columns, self.k, threads).columns == 0

    @property
    def name(self) -> str:
        order = f"{'score' if self.by_score else 'index'}_{'low' if self.low else 'high'}{'_forced' * self.forced}"
        project = f"{self.out}x{self.inner}_r{self.rows}"
        return f"mono_{self.scorer.name}_{self.mode}_n{self.columns}_k{self.k}_{order}_{project}"


def slot_bytes(blocks: int, k: int) -> int:
    """Of a staging slot of the layer's channel: ``kernel_channels={name: (blocks, slot_bytes(blocks, k))}``."""
    return channel_bytes(blocks, k)


def scratch_bytes(layer: Layer, threads: int, blocks: int) -> int:
    """Of the device memory in which blocks meet: a mark each, and what they list of long rows."""
    rows = layer.rows if layer.lists_runs(threads) else 0
    return marks_bytes(blocks) + rows * row_bytes(blocks, room_of(layer.k, blocks))


def _address(pointer: Any) -> Any:
    return fx.Int64(fx.ptrtoint(pointer))


@cache
def build(layer: Layer) -> Callable[[int, str, int, int], tuple[Any, tuple[Any, ...]]]:
    """The builder for one layer: ``(world, "bf16", blocks, threads)`` → launcher and placeholders."""

    def build_one(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
        layer.check(threads)
        plan = plan_of(layer.columns, layer.k, threads)
        kept = (layer.by_score, layer.low)
        form = Form(layer.mode, "scores", plan.columns, plan.k, *kept, True, layer.forced, fx.Float32, threads)
        rule = Rule(plan.k, threads, *kept, layer.mode == "shard", True)
        peers = fc.peers_type(world, blocks)

        @flyc.kernel(name=f"mono_indexer_{layer.scorer.kind}_{layer.mode}", known_block_size=[threads, 1, 1])
        def mono_indexer(
            comm: peers, tag: fx.Int32, queries: fx.Pointer, weights: fx.Pointer, cache: fx.Pointer,
            block_table: fx.Pointer, first_row: fx.Pointer, row_count: fx.Pointer, share: fx.Pointer, plane: fx.Pointer,
            requests: fx.Int32, table_stride: fx.Int32, page_first: fx.Int32, page_step: fx.Int32, columns: fx.Int32,
            page_stride: fx.Int64, token_stride: fx.Int64, scale_offset: fx.Int64, out_stride: fx.Int64,
            scale: fx.Float32, lengths: fx.Pointer, owners: fx.Pointer, out_scores: fx.Pointer, out_ids: fx.Pointer,
            out_counts: fx.Pointer, x: fx.Pointer, projection: fx.Pointer, projected: fx.Pointer, scratch: fx.Pointer,
            lists: fx.Int32, k: fx.Int32, granule: fx.Int32, first: fx.Int32, last: fx.Int32, rows: fx.Int32,
        ):  # fmt: skip
            shared = fx.SharedAllocator()
            pointers = (queries, weights, cache, block_table, first_row, row_count, share, plane)
            strides = (page_stride, token_stride, scale_offset)
            task = task_of(
                layer.scorer, shared, threads, pointers, table_stride, page_first, page_step, columns, strides,
                out_stride, scale,
            )  # fmt: skip
            totals = shared.allocate(fx.Array[fx.Int32, MAX_REQUESTS]).peek().ptr
            selecting = Scratch(shared)
            chosen = task.query.room(fx.Uint64, form.k)  # queries are used no more when it is
            if fx.const_expr(chosen is None):
                chosen = shared.allocate(fx.Array[fx.Uint64, form.k]).peek().ptr
            runs = chosen
            if fx.const_expr(form.small):
                runs = shared.allocate(fx.Array[fx.Uint64, threads // GROUP * RUN]).peek().ptr
            cut = shared.allocate(fx.Array[fx.Int32, blocks]).peek().ptr if layer.lists_runs(threads) else None
            call = fc.begin(comm, tag, shared)
            here = call.block < lists
            given = (plane, plane, lengths, owners, out_scores, out_ids, out_counts)
            every = Arguments(given, columns, out_stride, k, granule, fx.Int32(1), (first, last))
            a = at_row(every, here.select(call.block, fx.Int32(0)))
            part = parted(call, form, a)
            places = (_address(one) for one in (x, projection, projected))
            work = Projection(layer.inner, layer.out, layer.rows, blocks, threads, rows, *places)
            marks = _address(scratch)
            listed: Any = None
            if layer.lists_runs(threads):
                listed = Runs(marks + fx.Int64(marks_bytes(blocks)), blocks, room_of(form.k, blocks))

            fc.stage(call, "score")
            each_share(task, totals, requests, blocks)
            if fx.const_expr(listed is not None):
                stages.list_runs(call, listed, every, form, selecting, task, totals, requests)
            ready.mark(call, marks, call.block)
            ahead = work.ahead()
            ready.wait(call, marks, fx.Int32(0), here.select(fx.Int32(blocks), fx.Int32(0)))

            sure = here & call.live
            own = stages.nominate_and_push(call, form, a, part, listed, chosen, cut, selecting, runs, sure)
            packet.meet(call)
            fc.stage(call, "project")
            work.make(ahead)
            stages.merge_and_emit(call, form, a, rule, part, own, chosen, selecting, runs, here)
            fc.finish(call)

        @flyc.jit
        def launch(
            comm: peers, tag: fx.Int32, queries: fx.Pointer, weights: fx.Pointer, cache: fx.Pointer,
            block_table: fx.Pointer, first_row: fx.Pointer, row_count: fx.Pointer, share: fx.Pointer, plane: fx.Pointer,
            requests: fx.Int32, table_stride: fx.Int32, page_first: fx.Int32, page_step: fx.Int32, columns: fx.Int32,
            page_stride: fx.Int64, token_stride: fx.Int64, scale_offset: fx.Int64, out_stride: fx.Int64,
            scale: fx.Float32, lengths: fx.Pointer, owners: fx.Pointer, out_scores: fx.Pointer, out_ids: fx.Pointer,
            out_counts: fx.Pointer, x: fx.Pointer, projection: fx.Pointer, projected: fx.Pointer, scratch: fx.Pointer,
            lists: fx.Int32, k: fx.Int32, granule: fx.Int32, first: fx.Int32, last: fx.Int32, rows: fx.Int32,
            stream: fx.Stream,
        ):  # fmt: skip
            mono_indexer(
                comm, tag, queries, weights, cache, block_table, first_row, row_count, share, plane, requests,
                table_stride, page_first, page_step, columns, page_stride, token_stride, scale_offset, out_stride,
                scale, lengths, owners, out_scores, out_ids, out_counts, x, projection, projected, scratch, lists, k,
                granule, first, last, rows,
            ).launch(grid=(blocks,), block=(threads,), stream=stream)  # fmt: skip

        null = null_pointer(fx.Uint8, 1)
        scoring = (*[null] * 8, *[1] * 9, 1.0)
        return launch, (peers_placeholder(world, blocks), 0, *scoring, *[null] * 9, *[1] * 6, fx.Stream(None))

    return build_one
