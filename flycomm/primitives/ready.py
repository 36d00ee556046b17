# SPDX-License-Identifier: Apache-2.0
"""Ready marks: blocks of one grid tell each other, on their own device, that a row or a tile is finished.

A mark is a u32 in ordinary device memory, zero at first, owned by one block at a time (who makes what it stands for),
and holds the last epoch in which that was made. So it is compared with the epoch of the call and never reset: a
replayed graph needs no memset, and what rests for some launches is simply of another call. A row with several makers
has a mark for each, and its reader waits for all of them; a counter would have to be added to in every launch, and
would be wrong where epochs wrap. The proof is in the docs' memory model of ready marks.

``words`` below is the i64 address of an array of marks; all blocks of the kernel are resident (PROTOCOLS rule 12).
"""

from functools import partial
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.epoch import in_step
from flycomm.primitives import trace
from flycomm.primitives.access import DEVICE, pointer, wait_own_stores
from flycomm.primitives.call import Call, fail
from flycomm.primitives.peers import segment
from flycomm.primitives.poll import until

MARK_BYTES = 4


@flyc.jit
def mark(call: Call, words: Any, index: Any) -> None:
    """Mark ``index`` (i32): what this block has stored to its device's memory so far is ready, for this call.

    Every thread of the block calls it. Order: each thread waits for its own stores, then the block barrier, then one
    store with release at device scope. So a block that has waited sees every store that any thread of this one made
    before. Says nothing to peers, waits for no block, and does nothing but the barrier if the call has failed.

    It does not say that anybody has read: before a block writes the memory again, it waits for marks that all readers
    made after they had read, or for the next launch.
    """
    wait_own_stores()
    trace.mark(call, "ready.mark", index)
    fx.gpu.barrier()
    if call.live & (fx.thread_idx.x == 0):
        address = words + fx.Int64(index) * fx.Int64(MARK_BYTES)
        fx.generic_store(
            pointer(address, fx.Uint32, MARK_BYTES),
            call.epoch,
            memory_order=fx.AtomicOrdering.Release,
            syncscope=DEVICE,
        )


def _load(address: Any) -> Any:
    return fx.generic_load(
        pointer(address, fx.Uint32, MARK_BYTES),
        dtype=fx.Uint32,
        memory_order=fx.AtomicOrdering.Monotonic,
        syncscope=DEVICE,
    )


def _missing(epoch: Any, seen: Any) -> Any:
    """Not by the sign of the difference: by that a mark of 2**31 calls ago, or a new one, may look ahead."""
    return in_step(seen, epoch) == fx.Boolean(False)


@flyc.jit
def _poll_own(call: Call, words: Any, first: Any, count: Any, threads: int) -> None:
    """Poll every ``threads``-th mark from this thread's on, then acquire once; note the first that does not come."""
    reason, seen = fx.Int32(0), fx.Uint32(0)
    own = segment(call.comm, 0)
    at = fx.Int32(fx.thread_idx.x)
    if call.live & (at < count):
        while (at < count) & (reason == fx.Int32(0)):
            address = words + fx.Int64(first + at) * fx.Int64(MARK_BYTES)
            reason, seen = until(partial(_load, address), partial(_missing, call.epoch), call.comm.limit, own)
            at = at + fx.Int32(threads)
        fx.memory_fence(ordering=fx.AtomicOrdering.Acquire, syncscope=DEVICE)
        if reason != fx.Int32(0):
            fail(call, "ready", call.comm.rank, call.epoch, seen, reason)


def wait(call: Call, words: Any, first: Any, count: Any) -> Any:
    """Wait until the ``count`` (i32) marks from ``first`` (i32) on are of this call or the next one.

    Every thread of the block calls it; thread ``t`` polls the marks ``first + t``, and so on in steps of the block.
    Polls are relaxed and bounded like every wait; one acquire at device scope follows them, then a block barrier, after
    which every thread sees what the marking blocks stored. Returns, and leaves in ``call.live`` and ``call.ok``,
    whether all came: the block agrees. If not, the record says "ready", peers are told to stop, and this block posts
    and marks nothing more.

    A block barrier lies between ``begin``, or the wait before, and this (``mark`` and ``arrive`` contain one). Read
    with an address that differs between threads, or by ``access.load_relaxed``: a plain load that is the same for a
    whole wave may become a scalar one on AMD, and no acquire empties that cache.
    """
    threads, _, _ = fx.gpu.known_block_size()
    trace.begin(call, "ready.wait", first)
    _poll_own(call, words, first, count, threads)
    fx.gpu.barrier()
    trace.end(call, "ready.wait")
    call.ok = call.live & (call.failed[0] == fx.Int32(0))
    call.live = call.ok
    return call.ok
