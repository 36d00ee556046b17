# SPDX-License-Identifier: Apache-2.0
"""A step of a context-parallel indexer, and a projection that fills its waits, in one launch::

    score      every block: its run of this rank's keys, of all requests together; then its ready mark
    nominate   the block of a list: the marks of all blocks, then this rank's best k, from the scores
    push       the same block: tagged words to whoever merges the list
    project    every block: round(x @ projection.T), while the words travel
    merge      the block of a list: the words of all peers, the best k of all, ids, scores and counts

The stages are those of ``index_scores`` and ``topk_exchange``, called one after the other, so the bits are those of
``IndexerCP.decode``. List ``i`` (a query row, or one of its index heads) is block ``i``'s on every rank. Only that block
waits: for its device once, with the projection's first weights on their way, and for its peers once. The other blocks
score, mark and project.

Arguments of a launch: ``(comm, tag,`` those of ``index_scores`` from ``queries`` to ``scale``, with a plane of scores as
``out`` and no stream``, lengths, owners, out_scores, out_ids, out_counts, x, projection, projected, scratch, lists, k,
granule, first, last, rows, stream)``. ``lengths`` to ``out_counts`` and ``k`` to ``last`` as for ``topk_exchange``, with
lengths that count global keys. The plane's rows begin at multiples of 16 bytes; nobody else has it meanwhile. ``x``
(rows, inner), ``projection`` (out, inner), ``projected`` (rows, out): bf16, contiguous, 16-byte aligned. ``scratch``:
:func:`scratch_bytes` of device memory, zeros before the first launch, of this channel alone. ``lists``: 1 to the
channel's blocks; ``rows``: 1 to the layer's. All i32 but for pointers. All blocks are resident together.

The channel is this layer's own, with two buffers of ``channel_bytes(blocks, k)``, zero at first (docs: memory model of
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
from flycomm.kernels._index_score_task import MAX_REQUESTS
from flycomm.kernels._launch import null_pointer, peers_placeholder
from flycomm.kernels._mono_projection import COLUMNS, Projection
from flycomm.kernels._topk_exchange_meet import Part, merge_row, parted, push_row
from flycomm.kernels._topk_exchange_plan import k_class, plan_of
from flycomm.kernels._topk_exchange_row import Arguments, Form, at_row, nominate_row, of_row
from flycomm.kernels.index_scores import Scorer, each_share, task_of
from flycomm.primitives import packet, ready
from flycomm.primitives.block_scan import GROUP, Scratch
from flycomm.primitives.call import Call
from flycomm.primitives.merge import RUN
from flycomm.primitives.nominate import settle
from flycomm.primitives.result import Rule, emit
from flycomm.primitives.token import await_tokens, send_tokens

ROWS = (1, 2, 4, 8, 16)  # classes of query rows
_THREADS = (64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Layer:
    """What is fixed when the kernel is compiled, beside the grid; ``mode`` to ``forced`` as for ``topk_exchange``."""

    scorer: Scorer
    k: int
    columns: int  # keys of a list on one rank, at most
    inner: int  # elements of a row of x
    out: int  # of a row of what is projected
    rows: int  # query rows, one of ROWS
    mode: str = "all"
    by_score: bool = True
    low: bool = True
    forced: bool = False

    def check(self, threads: int) -> None:
        """Raise :class:`UsageError` for what the kernel cannot do."""
        if threads not in _THREADS or (k_class(self.k) > 2 * GROUP and threads > k_class(self.k) // 2):
            raise UsageError(
                f"a block of {threads} threads for k={self.k}; use one of {_THREADS}, at most half of k if that is over "
                f"{2 * GROUP}"
            )
        if self.rows not in ROWS or min(self.inner, self.out) < 1 or self.inner % 8 or self.out % COLUMNS:
            raise UsageError(
                f"a projection of {self.rows} rows from {self.inner} to {self.out}; rows are one of {ROWS}, the others "
                "multiples of 8: pad them"
            )

    @property
    def name(self) -> str:
        order = f"{'score' if self.by_score else 'index'}_{'low' if self.low else 'high'}{'_forced' * self.forced}"
        project = f"{self.out}x{self.inner}_r{self.rows}"
        return f"mono_{self.scorer.name}_{self.mode}_n{self.columns}_k{k_class(self.k)}_{order}_{project}"


def scratch_bytes(blocks: int) -> int:
    """Of the device memory in which blocks meet: a mark each."""
    return blocks * ready.MARK_BYTES


def _address(pointer: Any) -> Any:
    return fx.Int64(fx.ptrtoint(pointer))


@flyc.jit
def _tokens_if(call: Call, here: Any) -> None:
    if here:
        send_tokens(call)


@flyc.jit
def _nominate_and_push(call: Call, form: Form, a: Arguments, part: Part, chosen: Any, scratch: Any, here: Any) -> Any:
    own = [fx.Uint64(0) for _ in range(2 * form.pairs)]
    if here:
        total = nominate_row(call.comm, a, form, chosen, scratch)
        settle(call.comm, chosen, total, form.k, a.granule, form.low, form.threads)
        own = push_row(call, form, part, chosen)
    return own


@flyc.jit
def _merge_and_emit(
    call: Call, form: Form, a: Arguments, rule: Rule, part: Part, own: Any, chosen: Any, scratch: Any, runs: Any,
    here: Any,
) -> None:  # fmt: skip
    if here:
        mine = merge_row(call, form, a, rule, part, own, chosen, scratch, runs)
        ok = call.live & (call.failed[0] == fx.Int32(0))
        begin = fx.Int64(a.row) * fx.Int64(a.k) * fx.Int64(4)
        emit(rule, chosen, a.k, mine, ok, a.out_scores + begin, a.out_ids + begin, of_row(a.out_counts, a.row))
