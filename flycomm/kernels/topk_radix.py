# SPDX-License-Identifier: Apache-2.0
"""The k best of rows whose scores are spread over ranks, by a radix selection of all ranks together, in one launch.

A block finds its row's threshold with its peers, digit by digit (:mod:`flycomm.primitives.threshold`); then every rank
knows which of its keys are among the best, and where they stand in the whole list. Mode "shard" is done with that;
"all" and "owner" push the keys to their places (:mod:`flycomm.primitives.winners`). Nothing is nominated and nothing
merged, so neither the wire nor the work grows with the number of ranks times k. Each round costs a link's latency:
for many rows. A block does row ``b``, ``b + blocks``, …: any number of rows in one launch.

Modes, sources, arguments and results are those of :mod:`flycomm.kernels.topk_exchange`, bit by bit. The channel is
``_topk_exchange_plan.RADIX``'s, zero at first; all modes and all ``k`` use it, each epoch of a block being a round.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

import flycomm.primitives as fc
from flycomm.dtypes import REDUCIBLE
from flycomm.epoch import previous_epoch
from flycomm.geometry import Geometry
from flycomm.kernels._launch import null_pointer, peers_placeholder
from flycomm.kernels._specialization import Specialization
from flycomm.kernels._topk_exchange_plan import as_counted, resident_threads
from flycomm.kernels._topk_exchange_row import Arguments, Form, at_row, elements, of_row, owner_of
from flycomm.primitives.access import land_own_stores
from flycomm.primitives.block_scan import Scratch, clear, read, write
from flycomm.primitives.call import Call, advance, again
from flycomm.primitives.launch_order import in_turn
from flycomm.primitives.result import Rule, arrange, emit, keep
from flycomm.primitives.select import compact, places
from flycomm.primitives.threshold import COUNTERS, find_threshold, floor_of
from flycomm.primitives.winners import List, push_winners, take_winners


@flyc.jit
def _zero(counters: Any, count: int) -> None:
    thread = fx.Int32(fx.thread_idx.x)
    if thread < fx.Int32(count):
        write(counters, thread, fx.Uint32(0))


@flyc.jit
def _take(here: Call, winners: List, mine: Any, chosen: Any, threads: int) -> None:
    if mine:
        take_winners(here, winners, chosen, threads)


@flyc.jit
def _row(
    call: Call, form: Form, rule: Rule, most: int, a: Arguments, row: Any, epoch: Any, ok: Any, last: Any,
    chosen: Any, scratch: Scratch,
) -> Any:  # fmt: skip
    """One row, from what the row before left to what the next begins with: ``(epoch, ok, found)``."""
    comm, threads = call.comm, form.threads
    a = at_row(a, row)
    rough, exact = elements(comm, a, form)
    room = form.k if form.by_score and not rule.own else 0
    bound, epoch, ok = find_threshold(call, epoch, ok, rough, exact, a.k, room, scratch, threads)
    fx.gpu.barrier()
    counters = scratch.histogram + fx.Int32(COUNTERS)
    counts = [read(counters, fx.Int32(j)) for j in range(1, comm.world)]
    kept = exact(floor_of(bound))
    place, own = places(kept, bound, scratch, threads)
    _zero(counters, comm.world)
    here = again(call, previous_epoch(epoch), ok, last)
    winners = List(here, counts, own, form.k, most)
    first = fx.Uint32(0) if rule.own else winners.begin
    compact(kept, bound, first + place, partial(keep, chosen, form.k))
    fx.gpu.barrier()
    owner = owner_of(comm, a) if form.mode == "owner" else None
    mine = fx.Boolean(True) if owner is None else owner == comm.rank
    if fx.const_expr(comm.world > 1 and not rule.own):
        push_winners(here, winners, chosen, threads, owner)
        _take(here, winners, mine, chosen, threads)
        fx.gpu.barrier()
        ok = here.live & (here.failed[0] == fx.Int32(0))
    here.ok = ok
    advance(here)
    arrange(rule, chosen, own if rule.own else winners.total, scratch)
    begin = fx.Int64(a.row) * fx.Int64(a.k) * fx.Int64(4)
    emit(rule, chosen, a.k, mine, ok, a.out_scores + begin, a.out_ids + begin, of_row(a.out_counts, a.row))
    if last == fx.Boolean(False):
        land_own_stores()  # what was set to 0
    fx.gpu.barrier()
    return epoch, ok, here.found


@cache
def build(
    mode: str, source: str, columns: int, k: int, most: int, by_score: bool, low: bool, wide: bool, forced: bool
) -> Callable[[int, str, int, int], tuple[Any, tuple[Any, ...]]]:
    """``build`` of a :class:`Specialization`; its ``blocks`` are the channel's. See :func:`topk_exchange.build`.

    ``most``: the class of k that the channel has room for, not below ``k``.
    """

    def build_one(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
        element = getattr(fx, REDUCIBLE[dtype].fx_name)
        form = Form(mode, source, columns, k, by_score, low, wide, forced, element, threads)
        rule = Rule(k, threads, by_score, low, mode == "shard", False)
        peers = fc.peers_type(world, blocks)
        counted = as_counted(Geometry(blocks, threads))

        @flyc.kernel(name=f"topk_radix_{mode}", known_block_size=[threads, 1, 1])
        def radix(
            comm: peers, tag: fx.Int32, scores: fx.Pointer, ids: fx.Pointer, lengths: fx.Pointer, owners: fx.Pointer,
            out_scores: fx.Pointer, out_ids: fx.Pointer, out_counts: fx.Pointer, columns: fx.Int32, stride: fx.Int64,
            k: fx.Int32, granule: fx.Int32, spread: fx.Int32, first: fx.Int32, last: fx.Int32, rows: fx.Int32,
        ):  # fmt: skip
            in_turn(counted.blocks, counted.threads)
            shared = fx.SharedAllocator()
            scratch = Scratch(shared)
            chosen = shared.allocate(fx.Array[fx.Uint64, form.k]).peek().ptr
            pointers = (scores, ids, lengths, owners, out_scores, out_ids, out_counts)
            a = Arguments(pointers, columns, stride, k, granule, spread, (first, last))
            call = fc.begin(comm, tag, shared)
            clear(scratch, threads)
            fx.gpu.barrier()
            row, epoch, ok, found = a.row, call.entered, call.live, call.found
            while row < rows:
                after = row + fx.Int32(blocks)
                ends = after >= rows
                epoch, ok, found = _row(call, form, rule, most, a, row, epoch, ok, ends, chosen, scratch)
                row = after
            call.epoch, call.ok, call.found = epoch, ok, found
            fc.finish(call)

        @flyc.jit
        def launch(
            comm: peers, tag: fx.Int32, scores: fx.Pointer, ids: fx.Pointer, lengths: fx.Pointer, owners: fx.Pointer,
            out_scores: fx.Pointer, out_ids: fx.Pointer, out_counts: fx.Pointer, columns: fx.Int32, stride: fx.Int64,
            k: fx.Int32, granule: fx.Int32, spread: fx.Int32, first: fx.Int32, last: fx.Int32, rows: fx.Int32,
            grid: fx.Int32, stream: fx.Stream,
        ):  # fmt: skip
            radix(
                comm, tag, scores, ids, lengths, owners, out_scores, out_ids, out_counts, columns, stride, k, granule,
                spread, first, last, rows,
            ).launch(grid=(grid,), block=(threads,), stream=stream)  # fmt: skip

        null = null_pointer(fx.Uint8, 1)
        return launch, (peers_placeholder(world, blocks), 0, *[null] * 7, 1, 1, 1, 1, 0, 0, 0, 1, 1, fx.Stream(None))

    return build_one


def specialization(
    mode: str, source: str, columns: int, k: int, most: int, by_score: bool, low: bool, wide: bool, forced: bool,
    world: int, dtype: str, blocks: int, threads: int,
) -> Specialization:  # fmt: skip
    """See :func:`build`; ``dtype`` is a name of ``dtypes.REDUCIBLE``."""
    of = f"n{columns}" if source == "scores" else source
    order = f"{'score' if by_score else 'index'}_{'low' if low else 'high'}"
    name = (
        f"topk_radix_{mode}_{of}_k{k}of{most}_{order}" + ("_forced" if forced else "") + ("" if wide else "_unaligned")
    )
    build_one = build(mode, source, columns, k, most, by_score, low, wide, forced)
    return Specialization(name, build_one, world, dtype, blocks, threads, resident_threads(threads))
