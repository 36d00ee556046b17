# SPDX-License-Identifier: Apache-2.0
"""Packets (LL): data that carries its own flag, for small messages. One link latency, half the bandwidth.

A packet is two u64, each 4 bytes of data and the 32-bit epoch; a fragment is two packets, so a staging slot is twice as
wide as the message's. A reader polls until every tag *equals* its epoch: there is no signal, no fence and no barrier
with the peers. The idea is NCCL's LL protocol; the proof is in the docs' memory model. The verbs are those of
:mod:`flycomm.primitives.fragment`, with :func:`meet` for ``arrive`` and ``wait``.
"""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.channel import PACKETS_BYTES
from flycomm.primitives import trace
from flycomm.primitives.access import load_pair, store_pair
from flycomm.primitives.call import Call, advance, begin, finish, staging
from flycomm.primitives.peers import in_rank_order, peer_rank, segment
from flycomm.primitives.poll import until_arrived
from flycomm.primitives.reduce import nan_unless, reduce_in_rank_order

__all__ = ["begin", "collect", "finish", "meet", "post", "post_to", "take"]


def _packets(call: Call, fragment: Any) -> Any:
    """The fragment as four u64: 4 bytes of data below, the epoch above."""
    words = fragment.bitcast(fx.Uint32)
    tag = fx.Uint64(call.epoch) << fx.Uint64(32)
    return [fx.Uint64(words[i]) | tag for i in range(4)]


def _place(call: Call, slot: Any) -> Any:
    return staging(call, call.comm.rank) + fx.Int64(slot) * fx.Int64(PACKETS_BYTES)


@flyc.jit
def post_to(call: Call, j: int, fragment: Any, slot: Any) -> None:
    """Push ``fragment`` (16 bytes) to slot ``slot`` (i32) of rank ``(rank + j) % world`` alone.

    ``j`` is a compile-time int, not 0. Contract of :func:`post`; every peer must get something in every call.
    """
    trace.mark(call, "post", slot)
    if call.live:
        packed = _packets(call, fragment)
        address = segment(call.comm, j) + _place(call, slot)
        store_pair(address, packed[0], packed[1])
        store_pair(address + fx.Int64(16), packed[2], packed[3])


@flyc.jit
def post(call: Call, fragment: Any, slot: Any) -> None:
    """Push ``fragment`` (16 bytes) to slot ``slot`` (i32) of every peer, as packets of this call.

    Called by one thread, after ``begin``; at most once a slot and call; the same thread takes it. Orders nothing else.
    ``slot`` < ``comm.capacity / 32``. Writes nothing if the channel is poisoned.
    """
    trace.mark(call, "post", slot)
    if call.live:
        packed = _packets(call, fragment)
        offset = _place(call, slot)
        for j in fx.range_constexpr(1, call.comm.world):
            store_pair(segment(call.comm, j) + offset, packed[0], packed[1])
            store_pair(segment(call.comm, j) + offset + fx.Int64(16), packed[2], packed[3])


def meet(call: Call) -> None:
    """Between the posts and the takes of a call: a block barrier, and the epoch moves on. Every thread calls it.

    Waits for no peer. The barrier is for the state: every thread has read it before thread 0 advances it.
    """
    fx.gpu.barrier()
    advance(call)


def _load(addresses: Any) -> Any:
    return [word for address in addresses for at in (0, 16) for word in load_pair(address + fx.Int64(at))]


def _missing(words: Any, epoch: Any) -> Any:
    """Zero (u32) when every word is of ``epoch``."""
    rest = fx.Uint32(0)
    for word in words:
        rest = rest | (fx.Uint32(word >> fx.Uint64(32)) ^ epoch)
    return rest


def collect(call: Call, fragment: Any, slot: Any) -> Any:
    """What every rank posted to ``slot`` here, in rank order, and whether all of it came: ``(terms, ok)``.

    Called by the thread that posted the slot, after ``meet``; ``fragment`` is this rank's own term. Waits for every
    peer's packets, up to ``comm.limit``. If ``ok`` is false the terms mean nothing.
    """
    comm = call.comm
    if comm.world == 1:
        return [fragment], call.live
    base = segment(comm, 0) + fx.Int64(slot) * fx.Int64(PACKETS_BYTES)
    addresses = [base + staging(call, peer_rank(comm, j)) for j in range(1, comm.world)]
    trace.begin(call, "take", slot)
    words, ok = until_arrived(call, "packet", lambda: _load(addresses), lambda some: _missing(some, call.epoch))
    trace.end(call, "take")
    theirs = []
    for j in range(comm.world - 1):
        data = [fx.Uint32(word & fx.Uint64(0xFFFFFFFF)) for word in words[4 * j : 4 * j + 4]]
        theirs.append(fx.Vector.from_elements(data, fx.Uint32).bitcast(fragment.dtype))
    return in_rank_order(comm, fragment, theirs), ok


def take(call: Call, fragment: Any, slot: Any, reduction: str = "sum") -> Any:
    """What all ranks posted to ``slot``, reduced in rank order, as an f32 vector; :func:`collect` has the contract.

    ``reduction`` is one of ``dtypes.REDUCTIONS``. NaN in every element if something did not come.
    """
    terms, ok = collect(call, fragment, slot)
    return nan_unless(ok, reduce_in_rank_order(terms, reduction))
