# SPDX-License-Identifier: Apache-2.0
"""Between a row's nomination and its result: its block pushes, and merges.

The parts of ``topk_exchange`` and of ``mono_indexer``, which does other work between the two. Every thread of the row's
block makes every call, after ``begin``: :func:`parted`, :func:`push_row`, ``packet.meet``, :func:`merge_row`.
"""

from dataclasses import dataclass
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.kernels._topk_exchange_row import Arguments, Form, owner_of
from flycomm.primitives.block_scan import GROUP, Scratch, read, write
from flycomm.primitives.call import Call
from flycomm.primitives.candidates import ID_BITS, push_candidates, push_words, take_candidates
from flycomm.primitives.merge import merge_block, merge_runs
from flycomm.primitives.nominate import settle
from flycomm.primitives.peers import peer_rank
from flycomm.primitives.result import Rule, sorted_by, unsorted
from flycomm.primitives.sort import sort_block
from flycomm.primitives.stand_few import stand_few
from flycomm.primitives.token import await_tokens


@flyc.jit
def _push_run(call: Call, form: Form, a: Arguments, chosen: Any, runs: Any, total: Any, owner: Any) -> None:
    """Up to 64 ranks: each peer's words by a group of its own, as far as there are groups; the first keeps them all in
    ``runs`` as well."""
    lane, group = fx.Int32(fx.thread_idx.x) % fx.Int32(GROUP), fx.Int32(fx.thread_idx.x) // fx.Int32(GROUP)
    groups, world = form.threads // GROUP, call.comm.world
    if group < fx.Int32(max(1, min(groups, world - 1))):
        at = [lane, lane + fx.Int32(GROUP)]
        if fx.const_expr(form.source == "scores"):
            low, high, *at = stand_few(call.comm, chosen, total, a.granule, form.low)
        else:
            low, high = [read(chosen, i, fx.Uint64) for i in at]
        words = [i % fx.Int32(GROUP) * fx.Int32(2) + i // fx.Int32(GROUP) for i in at]  # a pair is that of a lane
        for j in fx.range_constexpr(1, world):
            if group == fx.Int32((j - 1) % groups):
                push_words(call, [low, high], words, form.k, [j], owner)
        if group == fx.Int32(0):
            write(runs, at[0], low)
            write(runs, at[1], high)


@flyc.jit
def _merge_runs(call: Call, rule: Rule, own: Any, a: Arguments, mine: Any, chosen: Any, runs: Any) -> None:
    if mine:
        merge_runs(call, rule, own, a.k, chosen, runs)


@flyc.jit
def _merge_block(call: Call, rule: Rule, own: Any, at: Any, a: Arguments, mine: Any, chosen: Any, scratch: Any) -> None:
    if mine:
        merge_block(call, rule, own, at, a.k, chosen, scratch)


@flyc.jit
def _share(call: Call, form: Form, rule: Rule, at: Any, owner: Any, mine: Any, chosen: Any) -> None:
    """What the owner has merged, to everybody's ``chosen``; nothing is sent if a wait of its block failed.

    The others look at the tokens first, so that a record names who did not come, not an owner who waits for it too.
    """
    theirs = mine == fx.Boolean(False)
    await_tokens(call, theirs)
    fx.gpu.barrier()
    well = call.failed[0] == fx.Int32(0)
    if mine & well:
        for n in fx.range_constexpr(len(at)):
            words = [read(chosen, at[n] * fx.Int32(2) + fx.Int32(h), fx.Uint64) for h in range(2)]
            ranks = [unsorted(rule, word) for word in words]
            push_candidates(call, ranks, at[n], form.k, range(1, call.comm.world))
    source = theirs.select(owner, peer_rank(call.comm, 1))
    ranks = take_candidates(call, at, [source] * len(at), theirs & well, form.k, True)
    if theirs:
        for i in fx.range_constexpr(2 * len(at)):
            write(chosen, at[i // 2] * fx.Int32(2) + fx.Int32(i % 2), sorted_by(rule, ranks[i]))


@dataclass(frozen=True)
class Part:
    """A block's part in its row. Trace-time only."""

    at: list[Any]  # pairs (i32) of the row's slot that this thread pushes, if k is over 64
    owner: Any  # i32; None where every rank merges
    mine: Any  # bool: this rank merges


def parted(call: Call, form: Form, a: Arguments) -> Part:
    """Who merges the row, and what this thread pushes of it."""
    owner = owner_of(call.comm, a) if form.owned else None
    mine = fx.Boolean(True) if owner is None else owner == call.comm.rank
    at = [fx.Int32(fx.thread_idx.x) + fx.Int32(n * form.threads) for n in range(form.pairs)]
    return Part(at, owner, mine)


def push_row(
    call: Call, form: Form, a: Arguments, part: Part, chosen: Any, total: Any, scratch: Scratch, runs: Any
) -> list[Any]:
    """Push what this rank nominates of the row, falling, to whoever merges it; waits for nothing.

    Of scores, ``chosen`` holds ``total`` (u32) local ranks in any order; of candidates, what ``load_nominated`` left.
    Returns the ranks (u64, two a pair) that this thread pushed; of up to 64, none: they are in ``runs``.
    """
    if form.small:
        if not form.columns:
            fx.gpu.barrier()  # nominate_few ends with one
        _push_run(call, form, a, chosen, runs, total, part.owner)
        return []
    if form.source == "scores":
        settle(call.comm, chosen, total, form.k, a.granule, form.low, form.threads)
        sort_block(chosen, form.k, ID_BITS, scratch, form.threads)
    own = [read(chosen, pair * fx.Int32(2) + fx.Int32(h), fx.Uint64) for pair in part.at for h in range(2)]
    for n, pair in enumerate(part.at):
        push_candidates(call, own[2 * n : 2 * n + 2], pair, form.k, range(1, call.comm.world), part.owner)
    return own


def merge_row(
    call: Call,
    form: Form,
    a: Arguments,
    rule: Rule,
    part: Part,
    own: list[Any],
    chosen: Any,
    scratch: Scratch,
    runs: Any,
) -> Any:
    """Take what the peers pushed, and merge it into ``chosen`` for ``result.emit``; returns whether this rank gets it.

    ``own``, and what is in ``chosen`` and ``runs``: by :func:`push_row`. ``runs``: shared memory for 64 ranks a group
    of lanes, if k is at most 64. Ends with a block barrier, after which ``call.failed`` says whether a wait gave up.
    """
    mine = part.mine
    if form.small:
        lane = fx.Int32(fx.thread_idx.x) % fx.Int32(GROUP)
        own = [read(runs, lane + fx.Int32(h * GROUP), fx.Uint64) for h in range(2)]
        _merge_runs(call, rule, own, a, mine, chosen, runs)
    else:
        _merge_block(call, rule, own, part.at, a, mine, chosen, scratch)
        if form.mode == "split" and call.comm.world > 1:
            _share(call, form, rule, part.at, part.owner, mine, chosen)
    if form.mode == "owner":
        await_tokens(call, mine == fx.Boolean(False))
    fx.gpu.barrier()
    return fx.Boolean(True) if form.mode == "split" else mine
