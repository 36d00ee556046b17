# SPDX-License-Identifier: Apache-2.0
"""Fragments: 16 bytes that one thread holds, pushed to every peer and summed in rank order.

The one-shot exchange with flags, in pieces, for kernels that do something else between them::

    call = fc.begin(comm)
    fc.post(call, partial, slot)      # as many slots as the channel's capacity holds
    fc.arrive(call)
    weights = load_next_weights()     # hides the link
    fc.wait(call)
    total = fc.take(call, partial, slot)
    fc.finish(call)

The torch op is a loop over these same functions, so both give the same bits.
"""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.channel import FRAGMENT_BYTES
from flycomm.primitives import trace
from flycomm.primitives.access import pull_fragment, push_fragment
from flycomm.primitives.barrier import arrive, wait
from flycomm.primitives.call import Call, begin, finish, staging
from flycomm.primitives.peers import peer_rank, segment
from flycomm.primitives.reduce import nan_unless, reduce_in_rank_order

__all__ = [
    "all_reduce_fragment",
    "arrive",
    "begin",
    "collect",
    "finish",
    "post",
    "post_to",
    "take",
    "take_from",
    "wait",
]


@flyc.jit
def post_to(call: Call, j: int, fragment: Any, slot: Any) -> None:
    """Push ``fragment`` (a vector of 16 bytes) to slot ``slot`` (i32) of rank ``(rank + j) % world`` alone.

    ``j`` is a compile-time int, not 0. Contract of :func:`post`; every peer must get something in every call, if only
    the signal of ``arrive``.
    """
    trace.mark(call, "post", slot)
    if call.live:
        offset = staging(call, call.comm.rank) + fx.Int64(slot) * fx.Int64(FRAGMENT_BYTES)
        push_fragment(segment(call.comm, j) + offset, fragment)


@flyc.jit
def post(call: Call, fragment: Any, slot: Any) -> None:
    """Push ``fragment`` (a vector of 16 bytes: f32×4, f16×8 or bf16×8) to slot ``slot`` (i32) of every peer.

    Called by one thread of the block, between ``begin`` and ``arrive``; at most once a slot and call; the map from
    slot to block is the same on all ranks. ``slot`` < ``comm.capacity / 16``. Publishes nothing by itself, waits for
    nothing, writes nothing if the channel is poisoned.
    """
    trace.mark(call, "post", slot)
    if call.live:
        offset = staging(call, call.comm.rank) + fx.Int64(slot) * fx.Int64(FRAGMENT_BYTES)
        for j in fx.range_constexpr(1, call.comm.world):
            push_fragment(segment(call.comm, j) + offset, fragment)


def collect(call: Call, fragment: Any, slot: Any) -> Any:
    """What every rank posted to ``slot`` here, in rank order, and whether the call holds: ``(terms, ok)``.

    Called by any thread of the block after ``wait``. ``fragment`` is this rank's own term: it is returned at its
    rank's place and never read back from staging. If ``ok`` is false the terms mean nothing.
    """
    trace.mark(call, "take", slot)
    comm = call.comm
    base = segment(comm, 0) + fx.Int64(slot) * fx.Int64(FRAGMENT_BYTES)
    terms = [fragment] if comm.world == 1 else []
    for source in range(comm.world if comm.world > 1 else 0):
        mine = comm.rank == fx.Int32(source)
        # nobody fills the own slot: a load from there would come from memory, not from cache
        filled = mine.select(fx.Int32((source + 1) % comm.world), fx.Int32(source))
        terms.append(mine.select(fragment, pull_fragment(base + staging(call, filled), fragment.dtype)))
    return terms, call.ok


def take_from(call: Call, j: int, dtype: Any, slot: Any) -> Any:
    """What rank ``(rank + j) % world`` posted to ``slot`` here, as a vector of ``dtype``; NaN if the call failed.

    ``j`` is a compile-time int, not 0. Called by any thread of the block after ``wait``.
    """
    trace.mark(call, "take", slot)
    source = peer_rank(call.comm, j)
    address = segment(call.comm, 0) + staging(call, source) + fx.Int64(slot) * fx.Int64(FRAGMENT_BYTES)
    fragment = pull_fragment(address, dtype)
    return call.ok.select(fragment, fx.Vector.filled(fragment.numel, float("nan"), dtype))


def take(call: Call, fragment: Any, slot: Any, reduction: str = "sum") -> Any:
    """What all ranks posted to ``slot``, reduced in rank order, as an f32 vector; :func:`collect` has the contract.

    ``reduction`` is one of ``dtypes.REDUCTIONS``. NaN in every element if the call failed.
    """
    terms, ok = collect(call, fragment, slot)
    return nan_unless(ok, reduce_in_rank_order(terms, reduction))


def all_reduce_fragment(call: Call, fragment: Any, slot: Any) -> Any:
    """``post``, ``arrive``, ``wait``, ``take``: the sum of ``fragment`` over all ranks, one slot a thread.

    Every thread of the block calls it, once a call, each with a slot of its own.
    """
    post(call, fragment, slot)
    arrive(call)
    wait(call)
    return take(call, fragment, slot)
