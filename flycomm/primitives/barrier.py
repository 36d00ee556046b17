# SPDX-License-Identifier: Apache-2.0
"""All ranks, block-paired: ``arrive`` and ``wait`` in two halves, ``barrier`` in one.

Block ``b`` meets block ``b`` of every peer; other blocks do not. Thread ``j`` of the block (1 ≤ j < world) speaks to
rank ``(rank + j) % world``, so a block has at least ``channel.MAX_WORLD`` threads.
"""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.channel import REASONS, signal_offset
from flycomm.epoch import in_step
from flycomm.primitives import signal as words
from flycomm.primitives import trace
from flycomm.primitives.access import load_relaxed, wait_own_stores
from flycomm.primitives.call import Call, advance, fail
from flycomm.primitives.peers import segment

_ABORT = REASONS.index("abort")
_DESYNC = REASONS.index("desync")
_MISMATCH = REASONS.index("mismatch")


def _is_partner(call: Any) -> Any:
    thread = fx.Int32(fx.thread_idx.x)
    return call.live & (thread >= fx.Int32(1)) & (thread < fx.Int32(call.comm.world))


def _partner(comm: Any) -> Any:
    """The rank (i32) this thread speaks to, and the address (i64) of its segment."""
    thread = fx.Int32(fx.thread_idx.x)
    shifted = comm.rank + thread
    rank = (shifted >= fx.Int32(comm.world)).select(shifted - fx.Int32(comm.world), shifted)
    address = segment(comm, comm.world - 1)
    for j in range(comm.world - 2, 0, -1):
        address = (thread == fx.Int32(j)).select(segment(comm, j), address)
    return rank, address


@flyc.jit
def arrive(call: Call) -> None:
    """Tell every peer that this block has made its stores of this call. Every thread of the block calls it.

    Order: each thread waits for its own stores, then the block barrier, then one signal to each peer at system scope.
    So a peer that has waited sees everything that any thread of this block stored to it before. Publishes stores to
    peer-mapped memory only. Does not wait for anybody.
    """
    wait_own_stores()
    trace.mark(call, "arrive")
    fx.gpu.barrier()
    if fx.const_expr(call.comm.world > 1):
        if _is_partner(call):
            _, address = _partner(call.comm)
            words.signal(address + fx.Int64(signal_offset(call.block, call.comm.rank)), call.epoch, call.tag)


@flyc.jit
def wait(call: Call, phase: str = "signal", pulled: bool = False) -> Any:
    """Wait until every peer's paired block has arrived at this call. Every thread of the block calls it, after arrive.

    Returns, and leaves in ``call.ok``, whether the call holds: the whole block agrees. Afterwards every thread sees
    what the peers stored before they arrived. If the channel was poisoned, or a peer did not come within
    ``comm.limit``, gave up, is at another call or came with another tag, it is false: no thread may write to a peer or
    read staging any more, and every thread falls through what remains.

    ``pulled`` (compile-time): the block has read memory of the peers themselves since its last ``wait``. Then the call
    also fails if a peer has given up by now: that peer may have written its memory before it was read.
    """
    comm = call.comm
    trace.begin(call, "wait")
    if fx.const_expr(comm.world > 1):
        if _is_partner(call):
            peer, _ = _partner(comm)
            own = segment(comm, 0)
            given_up = fx.Uint64(0)
            if fx.const_expr(pulled):
                given_up = load_relaxed(own)  # before the poll, so that it costs no trip; the reads have ended
            reason, seen = words.wait(own + fx.Int64(signal_offset(call.block, peer)), call.epoch, comm.limit, own)
            reason = ((reason == fx.Int32(0)) & (given_up != fx.Uint64(0))).select(fx.Int32(_ABORT), reason)
            epoch = words.epoch_of(seen)
            here = epoch == call.epoch
            lost = (reason == fx.Int32(0)) & (in_step(epoch, call.epoch) == fx.Boolean(False))
            reason = lost.select(fx.Int32(_DESYNC), reason)
            other = (reason == fx.Int32(0)) & here & (words.tag_of(seen) != call.tag)
            reason = other.select(fx.Int32(_MISMATCH), reason)
            if reason != fx.Int32(0):
                expected = other.select(call.tag, call.epoch)
                fail(call, phase, peer, expected, other.select(words.tag_of(seen), epoch), reason)
    fx.gpu.barrier()
    trace.end(call, "wait")
    call.ok = call.live & (call.failed[0] == fx.Int32(0))
    advance(call)
    return call.ok


def barrier(call: Call) -> Any:
    """:func:`arrive`, then :func:`wait`: nobody of the paired blocks leaves before all have entered."""
    arrive(call)
    return wait(call, "barrier")
