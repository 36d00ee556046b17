# SPDX-License-Identifier: Apache-2.0
"""What the block of a list does in ``mono_indexer``; a block that is ``here`` (bool) for none passes by."""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.kernels._index_score_task import Task
from flycomm.kernels._index_score_walk import each_run
from flycomm.kernels._mono_indexer_runs import Runs, lister
from flycomm.kernels._mono_indexer_select import nominate_from_runs
from flycomm.kernels._topk_exchange_meet import Part, merge_row, push_row
from flycomm.kernels._topk_exchange_row import Arguments, Form, nominate_row, of_row
from flycomm.primitives import trace
from flycomm.primitives.access import wait_own_stores
from flycomm.primitives.call import Call
from flycomm.primitives.result import Rule, emit
from flycomm.primitives.token import send_tokens


def list_runs(
    call: Call, runs: Runs, a: Arguments, form: Form, scratch: Any, task: Task, totals: Any, requests: Any
) -> None:
    """After ``each_share``: this block's best of every row that it has scored a run of."""
    trace.stage(call, "list")
    wait_own_stores()
    fx.gpu.barrier()
    each_run(task, totals, requests, runs.blocks, lister(call, runs, a, form, scratch))


@flyc.jit
def nominate_and_push(
    call: Call,
    form: Form,
    a: Arguments,
    part: Part,
    runs: Any,
    chosen: Any,
    cut: Any,
    scratch: Any,
    kept: Any,
    here: Any,
) -> Any:
    """This rank's best of the list, to whoever merges it: :func:`push_row`, whose result it returns.

    ``runs``: where all blocks have listed the best of their runs, or None; ``cut``: as for ``nominate_from_runs``;
    ``kept``: as ``runs`` for ``push_row``.
    After the marks of all blocks: so no block sends anything in a launch after one in which a wait of its rank failed.
    ``here``: and the marks have all come. Else blocks still write what this one would read several times, and counts
    that change between two readings lead past the end of ``chosen``.
    """
    trace.stage(call, "nominate")
    own = [fx.Uint64(0) for _ in range(2 * form.pairs)]
    if here:
        if fx.const_expr(form.mode == "owner"):
            send_tokens(call)
        if fx.const_expr(runs is None):
            total = nominate_row(call.comm, a, form, chosen, scratch)
        else:
            total = nominate_from_runs(call, runs, a, form, chosen, scratch, cut)
        own = push_row(call, form, a, part, chosen, total, scratch, kept)
    return own


@flyc.jit
def merge_and_emit(
    call: Call, form: Form, a: Arguments, rule: Rule, part: Part, own: Any, chosen: Any, scratch: Any, runs: Any,
    here: Any,
) -> None:  # fmt: skip
    """The list's result, or what says that it failed."""
    trace.stage(call, "merge")
    if here:
        mine = merge_row(call, form, a, rule, part, own, chosen, scratch, runs)
        ok = call.live & (call.failed[0] == fx.Int32(0))
        begin = fx.Int64(a.row) * fx.Int64(a.k) * fx.Int64(4)
        emit(rule, chosen, a.k, mine, ok, a.out_scores + begin, a.out_ids + begin, of_row(a.out_counts, a.row))
