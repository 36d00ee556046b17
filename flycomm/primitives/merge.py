# SPDX-License-Identifier: Apache-2.0
"""The global best k of what all ranks nominated for a row, exactly, by one block.

Who merges takes every word of every peer; its own nominations it has. All come falling, so nothing is selected or
sorted: lists merge pairwise (bitonic, Batcher). Up to 64 a rank, groups of 32 lanes take them into registers; more, the
block takes one after the other into its own, in shared memory. Either way the result follows from the total order of
ranks, whoever came first. Every thread of the block calls every function here; ``k`` (i32) is this call's, at most the
class.
"""

from collections.abc import Sequence
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives.block_scan import GROUP, Scratch, read, write
from flycomm.primitives.call import Call
from flycomm.primitives.candidates import take_candidates
from flycomm.primitives.merge_falling import merge_falling
from flycomm.primitives.peers import peer_rank
from flycomm.primitives.result import Rule, arrange, sorted_by
from flycomm.primitives.select_group import lane_steps, sort_group

RUN = 2 * GROUP  # ranks that a group of lanes keeps


def _shuffled(value: Any, shuffle: Any, by: Any) -> Any:
    """A u64 of another lane of the group."""
    halves = [fx.Uint32(shuffle(half, by, GROUP)) for half in (fx.Uint32(value), fx.Uint32(value >> fx.Uint64(32)))]
    return fx.Uint64(halves[0]) | (fx.Uint64(halves[1]) << fx.Uint64(32))


def _greater(a: Any, b: Any) -> Any:
    return (a > b).select(a, b)


def merge_groups(mine: Sequence[Any], theirs: Sequence[Any]) -> list[Any]:
    """The greatest 64 of two sorted runs of 64 over a group, sorted; lane ``i`` has elements ``i`` and ``32 + i``."""
    lane = fx.Int32(fx.thread_idx.x) % fx.Int32(GROUP)
    turned = [_shuffled(one, fx.gpu.shuffle_xor, GROUP - 1) for one in theirs]
    low, high = _greater(mine[0], turned[1]), _greater(mine[1], turned[0])
    low, high = _greater(low, high), (low > high).select(high, low)
    half = GROUP // 2
    return [lane_steps(low, lane, 2 * RUN, half), lane_steps(high, lane + fx.Int32(GROUP), 2 * RUN, half)]


@flyc.jit
def _write_run(run: Any, lane: Any, ranks: Sequence[Any], due: Any) -> None:
    if due:
        write(run, lane, ranks[0])
        write(run, lane + fx.Int32(GROUP), ranks[1])


def merge_runs(call: Call, rule: Rule, own: Sequence[Any], k: Any, chosen: Any, runs: Any) -> None:
    """Merge up to 64 ranks of every rank of the world into ``chosen``, in the order of the output, 0 behind the last.

    ``own``: elements ``lane`` and ``32 + lane`` of what this rank nominates, sorted, the same in every group; every
    source pushed such elements of its own as its pair ``lane``. ``runs``: shared memory for 64 ranks a group. A block
    barrier must follow.
    """
    comm = call.comm
    thread = fx.Int32(fx.thread_idx.x)
    lane, group = thread % fx.Int32(GROUP), thread // fx.Int32(GROUP)
    groups = rule.threads // GROUP
    best = [(group == fx.Int32(0)).select(one, fx.Uint64(0)) for one in own]
    for first in range(1, comm.world, groups):
        j = group + fx.Int32(first)
        due = j < fx.Int32(comm.world)
        source = (comm.rank + due.select(j, fx.Int32(1))) % fx.Int32(comm.world)
        best = merge_groups(best, take_candidates(call, [lane], [source], due, rule.k, rule.reset))
    active = 1
    while active < min(groups, comm.world - 1):
        active *= 2
    while active > 1:
        active //= 2
        giving = (group >= fx.Int32(active)) & (group < fx.Int32(2 * active))
        _write_run(runs + group * fx.Int32(RUN), lane, best, giving)
        fx.gpu.barrier()
        other = runs + ((group + fx.Int32(active)) % fx.Int32(groups)) * fx.Int32(RUN)
        best = merge_groups(best, [read(other, lane + fx.Int32(half * GROUP), fx.Uint64) for half in range(2)])
    if rule.own:
        last = k - fx.Int32(1)
        there = (last < fx.Int32(GROUP)).select(best[0], best[1])
        bound = _greater(_shuffled(there, fx.gpu.shuffle_idx, last % fx.Int32(GROUP)), fx.Uint64(1))
        best = [(one >= bound).select(one, fx.Uint64(0)) for one in own]
    else:
        best = [(lane + fx.Int32(h * GROUP) < k).select(one, fx.Uint64(0)) for h, one in enumerate(best)]
    if not rule.by_score:
        best = list(sort_group(*(sorted_by(rule, one) for one in best)))
    _write_run(chosen, lane, best, group == fx.Int32(0))


@flyc.jit
def merge_block(
    call: Call, rule: Rule, own: Sequence[Any], pairs: list[Any], k: Any, chosen: Any, scratch: Scratch
) -> None:
    """:func:`merge_runs` of more than 64 ranks a rank. ``chosen``: what this rank pushed, falling, behind a block
    barrier. ``own``: of that, what this thread pushed as its ``pairs`` (i32); every source's are falling too."""
    world, each = call.comm.world, 2 * len(pairs)
    if fx.const_expr(world > 1):
        sources = [peer_rank(call.comm, j) for j in range(1, world) for _ in pairs]
        theirs = take_candidates(call, pairs * (world - 1), sources, fx.Boolean(True), rule.k, rule.reset)
        for j in fx.range_constexpr(world - 1):
            merge_falling(chosen, theirs[j * each : (j + 1) * each], pairs, rule.k, rule.threads)
    count = fx.Uint32(k)
    if fx.const_expr(rule.own):
        bound = _greater(read(chosen, k - fx.Int32(1), fx.Uint64), fx.Uint64(1))
        count = fx.Uint32(rule.k)
        fx.gpu.barrier()
        for i in fx.range_constexpr(each):
            at = pairs[i // 2] * fx.Int32(2) + fx.Int32(i % 2)
            write(chosen, at, (own[i] >= bound).select(own[i], fx.Uint64(0)))
    if fx.const_expr(not rule.by_score):
        arrange(rule, chosen, count, scratch)
