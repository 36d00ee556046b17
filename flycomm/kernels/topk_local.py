# SPDX-License-Identifier: Apache-2.0
"""The k best scores of each row, exactly: one launch, deterministic to the bit. ``flycomm.ops.topk`` has the rules.

rows    one block a row, the whole row in its registers: one read of global memory
split   several blocks a row, for long rows, in three steps. Each block finds, from the same sample of the row, the same
        rank that rather more than k elements should reach. It reads its part of the row once and appends what reaches
        that rank to the row's candidates in the workspace. The block that finishes a row last selects among them; if
        they are too few, or did not fit, it selects from the row itself. So a sample that misleads costs time only.

No block waits for another, so nothing has to be resident. The last block sets the row's counters to zero again: a
workspace is zeroed once, then replays need nothing. Launches that share a workspace are ordered by their stream.

A :class:`Plan` fixes the geometry by the classes of columns and k, never by a live length. Arguments of a launch:
``(scores, lengths, out_scores, out_ids, out_counts, workspace, rows, columns, stride, k, stream)``: addresses of
(rows × columns) scores, rows ``stride`` elements apart; of i32 lengths, or 0; of f32 and i32 (rows × k) and i32 (rows,)
to write; of the workspace; ``stride`` is an i64, the other numbers are i32.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.dtypes import REDUCIBLE
from flycomm.kernels import _topk_split as split
from flycomm.kernels._launch import null_pointer
from flycomm.kernels._specialization import Specialization
from flycomm.kernels._topk_finish import Rules, finish, least
from flycomm.kernels._topk_plan import Plan
from flycomm.kernels._topk_rows import select_row
from flycomm.kernels._topk_sample import load_sample, sample_places, sampled_floor
from flycomm.primitives.access import load_element, store_element
from flycomm.primitives.score_row import ScoreRow, load_units
from flycomm.primitives.select import Scratch, clear


class _Arguments:
    """A launch's arguments, as addresses; trace-time only."""

    def __init__(self, scores: Any, lengths: Any, out_scores: Any, out_ids: Any, out_counts: Any, workspace: Any):
        pointers = (scores, lengths, out_scores, out_ids, out_counts, workspace)
        addresses = [fx.Int64(fx.ptrtoint(pointer)) for pointer in pointers]
        self.scores, self.lengths, self.out_scores, self.out_ids, self.out_counts, self.workspace = addresses


@flyc.jit
def _length(arguments: _Arguments, row: Any, columns: Any) -> Any:
    length = columns
    if arguments.lengths != fx.Int64(0):
        length = load_element(arguments.lengths + fx.Int64(row) * fx.Int64(4), fx.Int32)
        length = (length < fx.Int32(0)).select(fx.Int32(0), (length < columns).select(length, columns))
    return length


def _open(arguments: _Arguments, rules: Rules, dtype: str, wide: bool, row: Any, columns: Any, stride: Any) -> ScoreRow:
    element = getattr(fx, REDUCIBLE[dtype].fx_name)
    address = arguments.scores + fx.Int64(row) * stride * fx.Int64(element.width // 8)
    return ScoreRow(address, element, _length(arguments, row, columns), wide, rules.index_bits, rules.low)


def _need(length: Any, k: Any) -> Any:
    return fx.Uint32((k < length).select(k, length))


def _finish(
    arguments: _Arguments,
    rules: Rules,
    scratch: Scratch,
    chosen: Any,
    total: Any,
    ordered: Any,
    row: Any,
    need: Any,
    k: Any,
) -> None:
    begin = fx.Int64(row) * fx.Int64(k) * fx.Int64(4)
    scores, ids = arguments.out_scores + begin, arguments.out_ids + begin
    finish(rules, scratch, chosen, total, ordered, need, scores, ids, k)
    _store_count(arguments.out_counts + fx.Int64(row) * fx.Int64(4), need)


@flyc.jit
def _store_count(address: Any, need: Any) -> None:
    if fx.thread_idx.x == 0:
        store_element(address, fx.Int32(need))


@flyc.jit
def _split(
    rules: Rules,
    scratch: Scratch,
    chosen: Any,
    score_row: ScoreRow,
    plan: Plan,
    part: Any,
    header: Any,
    need: Any,
    k: Any,
) -> Any:
    """This block's part of a row; returns whether it finished the row, how many it selected, and if in order."""
    threads, per_unit = rules.threads, score_row.per_unit
    thread = fx.Int32(fx.thread_idx.x)
    clear(scratch, threads)
    total, ordered, floor = fx.Uint32(0), fx.Boolean(False), least(rules)
    width = plan.columns // plan.blocks // per_unit  # units a block
    first = part * fx.Int32(width)
    if first * fx.Int32(per_unit) < score_row.length:
        batch = [thread + fx.Int32(j * threads) for j in range(max(1, plan.per_thread // per_unit))]
        at = [first + place for place in batch]
        sample_at = sample_places(rules, score_row)
        sample = load_sample(rules, score_row, sample_at)
        loaded = load_units(score_row, at)  # on its way while the sample is looked at
        fx.gpu.barrier()
        floor = sampled_floor(rules, scratch, score_row, sample, sample_at, k)
        split.append(rules, scratch, score_row, loaded, at, floor, header)
        done = fx.Int32(len(batch) * threads)
        while (done < fx.Int32(width)) & ((first + done) * fx.Int32(per_unit) < score_row.length):
            at = [first + done + place for place in batch]
            split.append(rules, scratch, score_row, load_units(score_row, at), at, floor, header)
            done = done + fx.Int32(len(batch) * threads)
    last, count = split.arrive(scratch, header, plan.blocks)
    if last:
        total, ordered = split.select_last(rules, scratch, chosen, score_row, header, count, floor, need)
    return last, total, ordered


@cache
def build(plan: Plan, by_score: bool, low: bool, wide: bool) -> Callable[..., tuple[Any, tuple[Any, ...]]]:
    """``build`` of a :class:`Specialization`. ``wide``: every row begins at a multiple of 16 bytes."""
    columns_class, k_class, per_thread = plan.columns, plan.k, plan.per_thread

    def build_one(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
        return _build(Plan(blocks, threads, per_thread, columns_class, k_class), by_score, low, wide, dtype)

    return build_one


def specialization(plan: Plan, dtype: str, by_score: bool, low: bool, wide: bool) -> Specialization:
    """``dtype``: a name of ``dtypes.REDUCIBLE``; a world of one rank."""
    order = f"{'score' if by_score else 'index'}_{'low' if low else 'high'}{'' if wide else '_unaligned'}"
    name = f"topk_n{plan.columns}_k{plan.k}_{order}"
    return Specialization(name, build(plan, by_score, low, wide), 1, dtype, plan.blocks, plan.threads)


def _build(plan: Plan, by_score: bool, low: bool, wide: bool, dtype: str) -> tuple[Any, tuple[Any, ...]]:
    rules = Rules(plan, by_score, low)

    @flyc.kernel(name="topk_rows" if plan.blocks == 1 else "topk_split", known_block_size=[plan.threads, 1, 1])
    def topk(
        scores: fx.Pointer, lengths: fx.Pointer, out_scores: fx.Pointer, out_ids: fx.Pointer, out_counts: fx.Pointer,
        workspace: fx.Pointer, columns: fx.Int32, stride: fx.Int64, k: fx.Int32,
    ):  # fmt: skip
        shared = fx.SharedAllocator()
        scratch = Scratch(shared)
        chosen = shared.allocate(fx.Array[fx.Uint64, rules.room]).peek().ptr
        arguments = _Arguments(scores, lengths, out_scores, out_ids, out_counts, workspace)
        block = fx.Int32(fx.block_idx.x)
        row = block // fx.Int32(plan.blocks)
        score_row = _open(arguments, rules, dtype, wide, row, columns, stride)
        need = _need(score_row.length, k)
        if fx.const_expr(plan.blocks == 1):
            units = max(1, plan.per_thread // score_row.per_unit)
            total = select_row(rules, scratch, chosen, score_row, units, need)
            _finish(arguments, rules, scratch, chosen, total, fx.Boolean(False), row, need, k)
        else:
            header = arguments.workspace + fx.Int64(row) * fx.Int64(plan.row_bytes)
            part = block % fx.Int32(plan.blocks)
            last, total, ordered = _split(rules, scratch, chosen, score_row, plan, part, header, need, k)
            if last:
                _finish(arguments, rules, scratch, chosen, total, ordered, row, need, k)

    @flyc.jit
    def launch(
        scores: fx.Pointer, lengths: fx.Pointer, out_scores: fx.Pointer, out_ids: fx.Pointer, out_counts: fx.Pointer,
        workspace: fx.Pointer, rows: fx.Int32, columns: fx.Int32, stride: fx.Int64, k: fx.Int32, stream: fx.Stream,
    ):  # fmt: skip
        topk(scores, lengths, out_scores, out_ids, out_counts, workspace, columns, stride, k).launch(
            grid=(rows * plan.blocks,), block=(plan.threads,), stream=stream
        )

    null = null_pointer(fx.Uint8, 1)
    return launch, (*[null] * 6, 1, 1, 1, 1, fx.Stream(None))
