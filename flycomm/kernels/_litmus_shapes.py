# SPDX-License-Identifier: Apache-2.0
"""The racing part of each litmus test, in each order: what a thread stores and loads in one round, and what it saw.

Every location holds the epoch of the round in which it was last written. ``docs/litmus.md`` says which outcome is
forbidden in which order, and why.
"""

from collections.abc import Callable
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.epoch import arrived
from flycomm.kernels._litmus_plan import DATA, FLAG, GROUP, NEW_NEW
from flycomm.kernels._litmus_round import Round, stagger
from flycomm.primitives import signal
from flycomm.primitives.access import (
    acquire,
    load_relaxed,
    pull_fragment,
    push_fragment,
    store_flag,
    store_relaxed,
    wait_own_stores,
)
from flycomm.primitives.call import fail
from flycomm.primitives.peers import segment
from flycomm.primitives.poll import until


def _word(one: Round) -> Any:
    return signal.pack(one.call.epoch, fx.Uint32(0))


def _fence() -> None:
    fx.memory_fence(ordering=fx.AtomicOrdering.SeqCst)


@flyc.jit
def _hand_over(one: Round, peer: Any, mine: Any, there: Any) -> None:
    """The first thread of the block signals and waits for the partner's, once all threads have stored."""
    call = one.call
    wait_own_stores()
    fx.gpu.barrier()
    if fx.thread_idx.x == 0:
        signal.signal(there, call.epoch, fx.Uint32(0))
        reason, seen = signal.wait(mine, call.epoch, call.comm.limit, segment(call.comm, 0))
        if reason != fx.Int32(0):
            fail(call, "signal", peer, call.epoch, signal.epoch_of(seen), reason)
    fx.gpu.barrier()


@flyc.jit
def _gave_up(one: Round, peer: Any, reason: Any, seen: Any) -> None:
    if reason != fx.Int32(0):
        fail(one.call, "signal", peer, one.call.epoch, seen, reason)


def message_passing(one: Round, order: str) -> Any:
    """Data to the partner, then a flag; wait for the partner's flag, then read its data. Both directions at once."""
    return _pass(one, order, one.own, one.target)


def far_message_passing(one: Round, order: str) -> Any:
    """The same, but each rank keeps its flag in its own memory, and the partner polls it there."""
    return _pass(one, order, one.partner, one.own)


def _pass(one: Round, order: str, polled: Any, raised: Any) -> Any:
    stagger(one)
    return (_by_block if order == "library" else _by_thread)(one, polled, raised)


def _by_block(one: Round, polled: Any, raised: Any) -> Any:
    """All threads store and read, one of them signals and waits: the block's meeting is what the flag has to carry."""
    epoch, first = one.call.epoch, fx.Int32(0)
    push_fragment(one.place(one.target, DATA, one.thread), fx.Vector.from_elements([epoch] * 4, fx.Uint32))
    _hand_over(one, one.partner_rank(), one.place(polled, FLAG, first), one.place(raised, FLAG, first))
    words = pull_fragment(one.place(one.own, DATA, one.thread), fx.Uint32)
    found = words[0]
    for i in range(1, 4):
        found = (words[i] == words[0]).select(found, epoch + fx.Uint32(1))  # torn: impossible
    return one.sight(epoch, found)


def _by_thread(one: Round, polled: Any, raised: Any) -> Any:
    """Every thread has a flag of its own, and nothing stands between the accesses."""
    comm, epoch = one.call.comm, one.call.epoch
    mine, data = one.place(polled, FLAG, one.thread), one.place(one.own, DATA, one.thread)

    def load() -> Any:
        """Flag and data in one go, so that every lane reads its data right after the flag that it waited for."""
        flag = load_relaxed(mine)
        return signal.pack(signal.epoch_of(flag), signal.epoch_of(load_relaxed(data)))

    def behind(word: Any) -> Any:
        return arrived(signal.epoch_of(word), epoch) == fx.Boolean(False)

    store_relaxed(one.place(one.target, DATA, one.thread), _word(one))
    store_relaxed(one.place(raised, FLAG, one.thread), _word(one))
    reason, seen = until(load, behind, comm.limit, segment(comm, 0))
    _gave_up(one, one.partner_rank(), reason, signal.epoch_of(seen))
    return one.sight(signal.epoch_of(seen), signal.tag_of(seen))


def store_buffering(one: Round, order: str) -> Any:
    """Store to the partner, then load what the partner stores here. The code's first half is always new."""
    here = one.place(one.own, DATA, one.thread)
    stagger(one)
    _store(one, order)
    if order == "fenced":
        _fence()
    seen = load_relaxed(here)
    if order == "library":
        acquire(here)
    return one.sight(one.call.epoch, signal.epoch_of(seen))


def _store(one: Round, order: str, thread: Any = None) -> None:
    there = one.place(one.target, DATA, one.thread if thread is None else thread)
    (store_flag if order == "library" else store_relaxed)(there, _word(one))


def _read_twice(one: Round, order: str, thread: Any, areas: Any) -> Any:
    """Load the location in ``areas``, then the own one."""
    address = one.place(areas, DATA, thread)
    first = load_relaxed(address)
    if order == "library":
        acquire(address)
    elif order == "fenced":
        _fence()
    second = load_relaxed(one.place(one.own, DATA, thread))
    return one.sight(signal.epoch_of(first), signal.epoch_of(second))


@flyc.jit
def _writers_and_readers(one: Round, order: str, areas: Any) -> Any:
    """Groups of threads take turns: the even ones write a location, the odd ones read two."""
    group = one.thread // fx.Int32(GROUP)
    thread = (group >> fx.Int32(1)) * fx.Int32(GROUP) + one.thread % fx.Int32(GROUP)
    stagger(one)
    sight = fx.Uint32(NEW_NEW)
    if (group & fx.Int32(1)) == fx.Int32(0):
        _store(one, order, thread)
    else:
        sight = _read_twice(one, order, thread, areas)
    return sight


def independent_reads(one: Round, order: str) -> Any:
    """Two locations, each in the memory of a rank that reads: the partner's first, then the own. Others write them."""
    return _writers_and_readers(one, order, one.partner)


def coherence(one: Round, order: str) -> Any:
    """The own location twice, while another rank writes it."""
    return _writers_and_readers(one, order, one.own)


RACES: dict[str, Callable[[Round, str], Any]] = {
    "mp": message_passing,
    "mp_far": far_message_passing,
    "sb": store_buffering,
    "iriw": independent_reads,
    "coherence": coherence,
}
