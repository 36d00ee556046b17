# SPDX-License-Identifier: Apache-2.0
"""How a thread polls, and how long (PROTOCOLS rule 10): the one bound of every wait."""

from collections.abc import Callable
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.channel import REASONS
from flycomm.primitives.access import clock, load_relaxed
from flycomm.primitives.call import Call, fail_first
from flycomm.primitives.pause import pause
from flycomm.primitives.peers import segment

POLLS = 64  # before the first look at the clock and the abort word: a wait that succeeds by then pays for neither
PATIENT = POLLS - 1  # where a long wait sets its count of polls: from then on one poll, one look, one pause in turn

_TIMEOUT = REASONS.index("timeout")
_ABORT = REASONS.index("abort")


def why_stop(limit: Any, started: Any, abort_address: Any) -> Any:
    """An index (i32) of ``channel.REASONS``: more than ``limit`` ticks (0: no limit) since ``started``, or the abort
    word at ``abort_address`` is set; 0 to go on. What polls on goes on with :data:`PATIENT`, after a ``pause``."""
    late = (limit > fx.Int64(0)) & (clock() - started > limit)
    reason = late.select(fx.Int32(_TIMEOUT), fx.Int32(0))
    return (load_relaxed(abort_address) != fx.Uint64(0)).select(fx.Int32(_ABORT), reason)


@flyc.jit
def until(load: Callable[[], Any], behind: Callable[[Any], Any], limit: Any, abort_address: Any) -> Any:
    """``load()`` one word again and again while ``behind(word)``; returns ``(reason, seen)``.

    Called by one thread. ``reason`` (i32) is 0 once the word is no longer behind, else what :func:`why_stop` says;
    ``seen`` is the last word. Looks at the clock only after the first :data:`POLLS` polls; from then on it pauses and
    looks between two polls. Orders nothing.
    """
    seen = load()
    reason = fx.Int32(0)
    if behind(seen):
        started = clock()
        polls = fx.Int32(0)
        while behind(seen) & (reason == fx.Int32(0)):
            while behind(seen) & (polls < fx.Int32(POLLS)):
                seen = load()
                polls = polls + fx.Int32(1)
            if behind(seen):
                reason = why_stop(limit, started, abort_address)
                pause()
                polls = fx.Int32(PATIENT)
    return reason, seen


@flyc.jit
def until_whole(
    load: Callable[[], Any], missing: Callable[[Any], Any], due: Any, limit: Any, abort_address: Any
) -> Any:
    """``load()`` a list of words again and again until nothing is ``missing``; returns ``(words, reason)``.

    Called by one thread. ``missing(words)`` is zero (u32) when all have arrived; ``reason`` is as for :func:`until`.
    Waits only if ``due`` (bool); the words are loaded once in any case. Orders nothing.
    """
    words = load()
    rest = missing(words)
    reason = fx.Int32(0)
    if (rest != fx.Uint32(0)) & due:
        started = clock()
        polls = fx.Int32(0)
        while (rest != fx.Uint32(0)) & (reason == fx.Int32(0)):
            while (rest != fx.Uint32(0)) & (polls < fx.Int32(POLLS)):
                words = load()
                rest = missing(words)
                polls = polls + fx.Int32(1)
            if rest != fx.Uint32(0):
                reason = why_stop(limit, started, abort_address)
                pause()
                polls = fx.Int32(PATIENT)
    return words, reason


@flyc.jit
def until_arrived(call: Call, phase: str, load: Callable[[], Any], missing: Callable[[Any], Any]) -> Any:
    """Load words of every peer until nothing is ``missing``; returns ``(words, ok)``.

    Called by one thread, for data that carries its own mark. ``load()`` gives a list of u64, equally many a peer, in
    the order of ``segment(comm, 1)``, …; ``missing(words)`` is zero (u32) when all of them have arrived, and is also
    asked about one peer's words. ``ok`` is false, and the channel poisoned, if the wait went over ``comm.limit`` or a
    peer gave up. A poisoned channel is not waited on.
    """
    comm = call.comm
    words, reason = until_whole(load, missing, call.live, comm.limit, segment(comm, 0))
    if reason != fx.Int32(0):
        each = len(words) // (comm.world - 1)
        parts = [words[each * j : each * (j + 1)] for j in range(comm.world - 1)]
        fail_first(call, phase, [missing(part) for part in parts], [part[0] for part in parts], reason)
    return words, call.live & (reason == fx.Int32(0))
