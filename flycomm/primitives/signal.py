# SPDX-License-Identifier: Apache-2.0
"""Signal words: one thread tells one peer's thread how far it is.

A signal word is 64 bits: the epoch in the low half, the call's tag in the high half. It only ever counts up (in epoch
steps), so a reader compares ``int32(seen - epoch) >= 0``: the peer may already be one call ahead.
"""

from functools import partial
from typing import Any

import flydsl.expr as fx

from flycomm.epoch import arrived
from flycomm.primitives.access import acquire, load_relaxed, store_flag
from flycomm.primitives.poll import until


def pack(epoch: Any, tag: Any) -> Any:
    """The signal word (u64) of ``epoch`` and ``tag`` (both u32)."""
    return fx.Uint64(epoch) | (fx.Uint64(tag) << fx.Uint64(32))


def epoch_of(word: Any) -> Any:
    """The epoch (u32) in a signal word."""
    return fx.Uint32(word & fx.Uint64(0xFFFFFFFF))


def tag_of(word: Any) -> Any:
    """The tag (u32) in a signal word."""
    return fx.Uint32(word >> fx.Uint64(32))


def signal(address: Any, epoch: Any, tag: Any) -> None:
    """Store a signal word to the peer-mapped i64 ``address``, after the data that it announces.

    The caller is one thread. Every thread of its block that stored data to peers has called
    :func:`~flycomm.primitives.access.wait_own_stores`, and a block barrier lies between that and this
    (:func:`~flycomm.primitives.barrier.arrive` is the three together). System scope. Does not publish cached memory.
    """
    store_flag(address, pack(epoch, tag))


def _behind(epoch: Any, seen: Any) -> Any:
    return arrived(epoch_of(seen), epoch) == fx.Boolean(False)


def wait(address: Any, epoch: Any, limit: Any, abort_address: Any) -> Any:
    """Poll the signal word at ``address`` until its epoch is ``epoch`` or later; returns ``(reason, seen)``.

    The caller is one thread; the address is in its own rank's memory. ``reason`` (i32) is 0 once the peer has
    arrived, else an index of ``channel.REASONS``: the wait lasted more than ``limit`` ticks (0: no limit), or the abort
    word at ``abort_address`` was set. ``seen`` (u64) is the last word read. Polls are relaxed; one acquire follows
    them, so later reads of this thread (and, after a block barrier, of its block) see what the peer stored before its
    signal. Looks at the clock only after the first 64 polls, so a wait that succeeds at once costs a load and a fence.
    """
    reason, seen = until(partial(load_relaxed, address), partial(_behind, epoch), limit, abort_address)
    acquire(address)
    return reason, seen
