# SPDX-License-Identifier: Apache-2.0
"""Tokens: a word to every peer from a block that has nothing else for it, so that nobody runs ahead without bound.

A sender that has nothing to wait for would overwrite what a slow peer still reads (the docs' memory model). A token is
a signal word (epoch and tag) in the pad; it announces no data, so nothing is drained or published before it, and
whoever waits for one finds it there, unless a peer has not begun the call.
"""

from functools import partial
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.channel import REASONS, signal_offset
from flycomm.epoch import in_step
from flycomm.primitives import signal
from flycomm.primitives.access import load_relaxed, store_relaxed
from flycomm.primitives.call import Call, fail
from flycomm.primitives.peers import segment
from flycomm.primitives.poll import until

_DESYNC = REASONS.index("desync")
_MISMATCH = REASONS.index("mismatch")
_AHEAD = 1 << 16  # calls: what looks further ahead is a word that has rested


@flyc.jit
def send_tokens(call: Call) -> None:
    """Tell the paired block of every peer that this block has begun the call. Every thread calls it, after ``begin``.

    So the kernels before this one on its stream have ended. Threads 1 to ``world - 1`` store one word each. A poisoned
    channel sends nothing. In every call every block either sends these or sends every peer something else.
    """
    comm = call.comm
    offset = fx.Int64(signal_offset(call.block, comm.rank))
    if call.live:
        for j in fx.range_constexpr(1, comm.world):
            if fx.thread_idx.x == j:
                store_relaxed(segment(comm, j) + offset, signal.pack(call.epoch, call.tag))


def _behind(epoch: Any, seen: Any) -> Any:
    """Where every block counts every launch a word rests with its row: by the sign of the difference one of 2**31
    launches ago, or one that nobody has stored yet, would look ahead."""
    seen = signal.epoch_of(seen)
    return (seen - epoch >= fx.Uint32(_AHEAD)) | (seen == fx.Uint32(0))


@flyc.jit
def await_tokens(call: Call, due: Any) -> None:
    """Wait, if ``due`` (bool, the same for the block), for this call's token of every peer. Every thread calls it.

    Threads 1 to ``world - 1`` wait, each for one peer, up to ``comm.limit``; one that gives up, or finds another call's
    epoch or tag, poisons the block: after the next block barrier ``call.failed`` says so. Orders no data.
    """
    comm = call.comm
    thread = fx.Int32(fx.thread_idx.x)
    if due & call.live & (thread >= fx.Int32(1)) & (thread < fx.Int32(comm.world)):
        shifted = comm.rank + thread
        peer = (shifted >= fx.Int32(comm.world)).select(shifted - fx.Int32(comm.world), shifted)
        own = segment(comm, 0)
        address = own + fx.Int64(signal_offset(call.block, peer))
        # without signal.wait's acquire: a token announces nothing that is read, and caches stay as they are
        reason, seen = until(partial(load_relaxed, address), partial(_behind, call.epoch), comm.limit, own)
        epoch, tag = signal.epoch_of(seen), signal.tag_of(seen)
        lost = (reason == fx.Int32(0)) & (in_step(epoch, call.epoch) == fx.Boolean(False))
        reason = lost.select(fx.Int32(_DESYNC), reason)
        other = (reason == fx.Int32(0)) & (epoch == call.epoch) & (tag != call.tag)
        reason = other.select(fx.Int32(_MISMATCH), reason)
        if reason != fx.Int32(0):
            fail(call, "token", peer, other.select(call.tag, call.epoch), other.select(tag, epoch), reason)
