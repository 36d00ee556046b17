# SPDX-License-Identifier: Apache-2.0
"""Sentinels (Lamport): data without tags, for float sums of medium size. One link latency, the whole bandwidth.

Staging that has not been written holds the word 0x80000000, which a sender never sends: it sends 0 instead (as f32 −0
becomes +0, as a 16-bit pair (+0, −0) becomes (+0, +0)), so only sums may use it. Three buffers: a call fills and reads
``epoch % 3`` and clears, in its own memory, the one that the call before it read. The idea is Lamport's, as in
TensorRT-LLM's one-shot all-reduce; the proof is in the docs' memory model. The verbs are those of
:mod:`flycomm.primitives.packet`.
"""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.channel import BUFFERS, DIRTY, FRAGMENT_BYTES, SENTINEL, state_offset
from flycomm.primitives import call as calls
from flycomm.primitives import trace
from flycomm.primitives.access import load_element, load_pair, store_element, store_pair
from flycomm.primitives.call import Call, advance, finish, staging
from flycomm.primitives.peers import in_rank_order, peer_rank, segment
from flycomm.primitives.poll import until_arrived
from flycomm.primitives.reduce import nan_unless, reduce_in_rank_order

__all__ = ["begin", "collect", "finish", "meet", "post", "post_to", "take"]

_BUFFERS = BUFFERS["sentinel"]


def begin(comm: Any, tag: Any = 0, shared: Any = None) -> Call:
    """:func:`flycomm.primitives.begin`, and a rank that has given up in any block stays silent in all of them.

    A peer that is late cannot tell a later call's data from an earlier one's: there is no tag. What counts is this
    rank's own failure (its claim of the record), not a peer's abort: that is seen in a wait, and reported. The threads
    of a block need not find the same, since each fills and takes its own slots.
    """
    call = calls.begin(comm, tag, shared)
    call.live = call.live & (load_element(comm.state + fx.Int64(calls.CLAIM), fx.Uint32) == fx.Uint32(0))
    call.ok = call.live
    return call


def _halves(fragment: Any) -> Any:
    """The fragment as two u64 in which no u32 is the sentinel."""
    words = fragment.bitcast(fx.Uint32)
    clean = [(words[i] == fx.Uint32(SENTINEL)).select(fx.Uint32(0), words[i]) for i in range(4)]
    return [fx.Uint64(clean[2 * i]) | (fx.Uint64(clean[2 * i + 1]) << fx.Uint64(32)) for i in range(2)]


def _place(call: Call, slot: Any) -> Any:
    return staging(call, call.comm.rank, _BUFFERS) + fx.Int64(slot) * fx.Int64(FRAGMENT_BYTES)


@flyc.jit
def post_to(call: Call, j: int, fragment: Any, slot: Any) -> None:
    """Push ``fragment`` (16 bytes of floats) to slot ``slot`` (i32) of rank ``(rank + j) % world`` alone.

    ``j`` is a compile-time int, not 0. Contract of :func:`post`; every peer must get something in every call.
    """
    trace.mark(call, "post", slot)
    if call.live:
        low, high = _halves(fragment)
        store_pair(segment(call.comm, j) + _place(call, slot), low, high)


@flyc.jit
def post(call: Call, fragment: Any, slot: Any) -> None:
    """Push ``fragment`` (16 bytes of floats) to slot ``slot`` (i32) of every peer.

    Called by one thread, after ``begin``; at most once a slot and call; the same thread takes it. Orders nothing else.
    ``slot`` < ``comm.capacity / 16``. Writes nothing if the channel is poisoned.
    """
    trace.mark(call, "post", slot)
    if call.live:
        low, high = _halves(fragment)
        offset = _place(call, slot)
        for j in fx.range_constexpr(1, call.comm.world):
            store_pair(segment(call.comm, j) + offset, low, high)


@flyc.jit
def meet(call: Call, first: Any, step: Any, count: Any) -> None:
    """Between the posts and the takes: clear what this thread took in the call before, and move the epoch on.

    Every thread calls it. ``first`` and ``step`` (i32): the thread's slots are ``first, first + step, …``; ``count``
    (i32): this call uses slots below it. Waits for no peer; contains a block barrier.
    """
    comm = call.comm
    state = comm.state + fx.Int64(state_offset(call.block))
    dirty = load_element(state + fx.Int64(DIRTY), fx.Int32)
    mark = fx.Uint64(SENTINEL) | (fx.Uint64(SENTINEL) << fx.Uint64(32))
    if call.live:
        slot = first
        while slot < dirty:
            base = segment(comm, 0) + fx.Int64(slot) * fx.Int64(FRAGMENT_BYTES)
            for j in fx.range_constexpr(1, comm.world):
                store_pair(base + staging(call, peer_rank(comm, j), _BUFFERS, _BUFFERS - 1), mark, mark)
            slot = slot + step
    fx.gpu.barrier()
    if call.live & (fx.thread_idx.x == 0):
        store_element(state + fx.Int64(DIRTY), count)
    advance(call)


def _load(addresses: Any) -> Any:
    return [word for address in addresses for word in load_pair(address)]


def _missing(words: Any) -> Any:
    """Zero (u32) when no half of a word is the sentinel."""
    rest = fx.Uint32(0)
    for word in words:
        for half in (fx.Uint32(word & fx.Uint64(0xFFFFFFFF)), fx.Uint32(word >> fx.Uint64(32))):
            rest = rest | (half == fx.Uint32(SENTINEL)).select(fx.Uint32(1), fx.Uint32(0))
    return rest


def collect(call: Call, fragment: Any, slot: Any) -> Any:
    """What every rank posted to ``slot`` here, in rank order, and whether all of it came: ``(terms, ok)``.

    Called by the thread that posted the slot, after ``meet``; ``fragment`` is this rank's own term. Waits until no word
    of a peer is the sentinel, up to ``comm.limit``. If ``ok`` is false the terms mean nothing.
    """
    comm = call.comm
    if comm.world == 1:
        return [fragment], call.live
    base = segment(comm, 0) + fx.Int64(slot) * fx.Int64(FRAGMENT_BYTES)
    addresses = [base + staging(call, peer_rank(comm, j), _BUFFERS) for j in range(1, comm.world)]
    trace.begin(call, "take", slot)
    words, ok = until_arrived(call, "sentinel", lambda: _load(addresses), _missing)
    trace.end(call, "take")
    theirs = [
        fx.Vector.from_elements(words[2 * j : 2 * j + 2], fx.Uint64).bitcast(fragment.dtype)
        for j in range(comm.world - 1)
    ]
    return in_rank_order(comm, fragment, theirs), ok


def take(call: Call, fragment: Any, slot: Any, reduction: str = "sum") -> Any:
    """What all ranks posted to ``slot``, reduced in rank order, as an f32 vector; :func:`collect` has the contract.

    ``reduction`` is "sum" or "avg": others tell -0 from +0. NaN in every element if something did not come.
    """
    terms, ok = collect(call, fragment, slot)
    return nan_unless(ok, reduce_in_rank_order(terms, reduction))
