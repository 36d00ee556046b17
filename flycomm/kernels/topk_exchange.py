# SPDX-License-Identifier: Apache-2.0
"""The k best of rows whose scores are spread over ranks: nominate, push, merge, in one launch; a block a row.

Modes: "all": every rank gets every row's best; "shard": of these, a rank gets those that it nominated; "owner": row
``r``'s best go to one rank, ``r % world`` or ``owners[r]``, and the other ranks get padding; "split" (``k`` over 64):
what "all" gives, by way of rank ``r % world``, which merges and pushes the result. The result is that of one rank with
all scores, to the bit. Sources: "scores": each block selects from its row of local scores, which are read once if they
are few enough for its registers (a class of columns), else a few times; "candidates": another kernel has found the best
k, as f32 scores and i32 local ids (rows × k, -1 for none).

Arguments of a launch: ``(comm, tag, scores, ids, lengths, owners, out_scores, out_ids, out_counts, columns, stride, k,
granule, spread, first, last, rows, stream)``. ``scores``: rows ``stride`` (i64) elements apart, of ``columns`` each;
``ids``: likewise, or 0. ``lengths``, ``owners``: i32 (rows,), or 0 for all columns and for ``r % world``. ``spread``
(i32): 1 if lengths count global positions of the shard, alike on all ranks, 0 if they count this rank's own. Forced,
with global lengths: the first ``first`` and the last ``last`` positions of a row. ``granule``: of the shard. Outputs:
f32 and i32 (rows × k), i32 (rows,). ``rows``, at most the channel's blocks, and ``k`` are alike on all ranks.

The channel has two buffers of at least ``rows * class * 8`` bytes a source, zero at first. One class of k uses it, and
either "owner" and "split" or the other modes (docs: memory model of the top-k exchange). A call that fails gives NaN,
ids -1 and counts -1.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

import flycomm.primitives as fc
from flycomm.dtypes import REDUCIBLE
from flycomm.geometry import Geometry
from flycomm.kernels._launch import null_pointer, peers_placeholder
from flycomm.kernels._specialization import Specialization
from flycomm.kernels._topk_exchange_meet import merge_row, parted, push_row
from flycomm.kernels._topk_exchange_plan import as_counted, resident_threads
from flycomm.kernels._topk_exchange_row import Arguments, Form, nominate_row, of_row
from flycomm.primitives import packet
from flycomm.primitives.block_scan import GROUP, Scratch
from flycomm.primitives.launch_order import in_turn
from flycomm.primitives.merge import RUN
from flycomm.primitives.result import Rule, emit
from flycomm.primitives.token import send_tokens

MODES = ("all", "shard", "owner")
SOURCES = ("scores", "candidates")


@cache
def build(
    mode: str, source: str, columns: int, k: int, by_score: bool, low: bool, wide: bool, forced: bool
) -> Callable[[int, str, int, int], tuple[Any, tuple[Any, ...]]]:
    """``build`` of a :class:`Specialization`; its ``blocks`` are the channel's, at least as many as a launch has rows.

    ``columns``: of the class, if rows fit a block's registers, else 0. ``k``: the class. ``by_score``: the order, else
    by id. ``low``: the lower id of equals wins. ``wide``: every row begins at a multiple of 16 bytes.
    """

    def build_one(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
        element = getattr(fx, REDUCIBLE[dtype].fx_name)
        form = Form(mode, source, columns, k, by_score, low, wide, forced, element, threads)
        rule = Rule(k, threads, by_score, low, mode == "shard", form.owned)
        peers = fc.peers_type(world, blocks)
        counted = as_counted(Geometry(blocks, threads))

        @flyc.kernel(name=f"topk_exchange_{mode}", known_block_size=[threads, 1, 1])
        def exchange(
            comm: peers, tag: fx.Int32, scores: fx.Pointer, ids: fx.Pointer, lengths: fx.Pointer, owners: fx.Pointer,
            out_scores: fx.Pointer, out_ids: fx.Pointer, out_counts: fx.Pointer, columns: fx.Int32, stride: fx.Int64,
            k: fx.Int32, granule: fx.Int32, spread: fx.Int32, first: fx.Int32, last: fx.Int32,
        ):  # fmt: skip
            in_turn(counted.blocks, counted.threads)
            shared = fx.SharedAllocator()
            scratch = Scratch(shared)
            chosen = shared.allocate(fx.Array[fx.Uint64, form.k]).peek().ptr
            runs = chosen
            if fx.const_expr(form.small):
                runs = shared.allocate(fx.Array[fx.Uint64, threads // GROUP * RUN]).peek().ptr
            pointers = (scores, ids, lengths, owners, out_scores, out_ids, out_counts)
            a = Arguments(pointers, columns, stride, k, granule, spread, (first, last))
            call = fc.begin(comm, tag, shared)
            total = nominate_row(comm, a, form, chosen, scratch)
            if fx.const_expr(form.owned):
                send_tokens(call)  # not before the scores are on their way: it waits for the state
            part = parted(call, form, a)
            own = push_row(call, form, a, part, chosen, total, scratch, runs)
            packet.meet(call)
            mine = merge_row(call, form, a, rule, part, own, chosen, scratch, runs)
            call.ok = call.live & (call.failed[0] == fx.Int32(0))
            begin = fx.Int64(a.row) * fx.Int64(k) * fx.Int64(4)
            emit(rule, chosen, k, mine, call.ok, a.out_scores + begin, a.out_ids + begin, of_row(a.out_counts, a.row))
            fc.finish(call)

        @flyc.jit
        def launch(
            comm: peers, tag: fx.Int32, scores: fx.Pointer, ids: fx.Pointer, lengths: fx.Pointer, owners: fx.Pointer,
            out_scores: fx.Pointer, out_ids: fx.Pointer, out_counts: fx.Pointer, columns: fx.Int32, stride: fx.Int64,
            k: fx.Int32, granule: fx.Int32, spread: fx.Int32, first: fx.Int32, last: fx.Int32, rows: fx.Int32,
            stream: fx.Stream,
        ):  # fmt: skip
            exchange(
                comm, tag, scores, ids, lengths, owners, out_scores, out_ids, out_counts, columns, stride, k, granule,
                spread, first, last,
            ).launch(grid=(rows,), block=(threads,), stream=stream)  # fmt: skip

        null = null_pointer(fx.Uint8, 1)
        return launch, (peers_placeholder(world, blocks), 0, *[null] * 7, 1, 1, 1, 1, 0, 0, 0, 1, fx.Stream(None))

    return build_one


def specialization(
    mode: str, source: str, columns: int, k: int, by_score: bool, low: bool, wide: bool, forced: bool,
    world: int, dtype: str, blocks: int, threads: int,
) -> Specialization:  # fmt: skip
    """See :func:`build`; ``dtype`` is a name of ``dtypes.REDUCIBLE``."""
    of = f"n{columns}" if source == "scores" else source
    order = f"{'score' if by_score else 'index'}_{'low' if low else 'high'}"
    name = f"topk_exchange_{mode}_{of}_k{k}_{order}" + ("_forced" if forced else "") + ("" if wide else "_unaligned")
    build_one = build(mode, source, columns, k, by_score, low, wide, forced)
    return Specialization(name, build_one, world, dtype, blocks, threads, resident_threads(threads))
