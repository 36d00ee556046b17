# SPDX-License-Identifier: Apache-2.0
"""One call of a channel by one block: its epoch, whether it may run, and what happens when it gives up."""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.channel import PHASES, REASONS, staging_offset, state_offset
from flycomm.epoch import next_epoch
from flycomm.primitives import trace
from flycomm.primitives.access import DEVICE, load_element, pointer, release, store_flag, store_relaxed
from flycomm.primitives.peers import peer_rank, segment

_POISON = 4  # offset in a block's state
CLAIM = 12  # offset in block 0's state: which block writes the record


class Call:
    """What :func:`begin` learnt, for the other primitives of the same call. Trace-time only: it is not a kernel value.

    ``comm``, ``block``, ``tag`` as given; ``epoch`` (u32) of this call; ``live`` (bool): the channel is not poisoned;
    ``ok`` (bool): ``live``, and after :func:`flycomm.primitives.barrier.wait` that no wait of this block failed.
    ``trace``: where this block's records go, None in a kernel that makes none.
    ``entered`` (u32): the epoch in the state when the kernel began; ``found`` (u32): what thread 0 found there when it
    advanced it; ``last`` (bool, or None for a kernel of one call): no call of the channel follows in this kernel.
    """

    def __init__(self, comm: Any, block: Any, tag: Any, previous: Any, live: Any, failed: Any):
        self.comm = comm
        self.block = block
        self.tag = tag
        self.epoch = next_epoch(previous)
        self.live = live
        self.ok = live
        self.failed = failed
        self.entered = previous
        self.found = previous
        self.last: Any = None
        self.trace: Any = None


def again(call: Call, previous: Any, ok: Any, last: Any) -> Call:
    """The call after that of epoch ``previous`` (u32) of the same channel in the same kernel.

    For flags, and for words that every thread sends and takes in every one of these calls
    (:mod:`flycomm.primitives.digits`); who does not ``wait`` advances the state with the last of them.

    ``call`` is what :func:`begin` gave, before any ``wait`` of it; ``ok`` (bool) is the ``ok`` that the call before
    left, which the block agrees on; ``last`` (bool), the same for the whole block: whether the kernel ends with this
    one. Epochs are counted in registers; the state is advanced once, by the last ``wait``. Carry ``epoch``, ``ok`` and
    ``found`` of the new call on to the next, and put the last ones into ``call`` before :func:`finish`.
    """
    following = Call(call.comm, call.block, call.tag, previous, ok, call.failed)
    following.entered = call.entered
    following.found = call.entered
    following.last = last
    following.trace = call.trace
    return following


def staging(call: Call, source: Any, buffers: int = 2, ahead: int = 0) -> Any:
    """Offset (i64) in a segment of what rank ``source`` (i32) fills in this call, or in the call ``ahead`` of it."""
    comm = call.comm
    buffer = fx.Int64((call.epoch + fx.Uint32(ahead)) % fx.Uint32(buffers))
    return staging_offset(comm.blocks, comm.world, comm.capacity, buffer, fx.Int64(source))


@flyc.jit
def begin(comm: Any, tag: Any = 0, shared: Any = None) -> Any:
    """Enter a call of the channel ``comm``. Every thread of every block of the channel's grid calls it, once a call.

    Reads the block's epoch and poison mark. Orders nothing; no data moves. ``tag`` (i32) travels with the signals and
    is compared by the peers: a hash of what the ranks must agree on. ``shared`` is the kernel's own
    ``fx.SharedAllocator`` (FlyDSL allows one a kernel); left out, one is made. Returns a :class:`Call`.

    Once a kernel and channel: a thread that began again could read the state before thread 0 has advanced it. May be
    captured in a graph: the epoch lives in device memory. Between ``begin`` and the first use of what ``wait``
    returns there must be one block barrier; :func:`~flycomm.primitives.barrier.arrive` contains it.
    """
    block = fx.Int32(fx.block_idx.x)
    state = comm.state + fx.Int64(state_offset(block))
    previous = load_element(state, fx.Uint32)
    poisoned = load_element(state + fx.Int64(_POISON), fx.Uint32)
    allocator = fx.SharedAllocator() if shared is None else shared
    failed = allocator.allocate(fx.Array[fx.Int32, 1]).peek()
    if fx.thread_idx.x == 0:
        failed[0] = fx.Int32(0)
    call = Call(comm, block, fx.Uint32(tag), previous, poisoned == fx.Uint32(0), failed)
    trace.listen(call)
    trace.begin(call, "call", call.epoch)
    return call


@flyc.jit
def advance(call: Call) -> None:
    """Thread 0 moves the block's epoch on, if the call holds; every thread calls it, after a block barrier.

    ``wait`` calls it when it has settled ``ok``, ``packet.meet`` and ``sentinel.meet`` before anything is waited for.
    By compare-and-swap; :func:`finish` looks at what it found, so that the answer travels while the block sums.
    """
    found = call.entered
    due = call.ok & (fx.thread_idx.x == 0)
    if fx.const_expr(call.last is not None):
        due = due & call.last
    if due:
        address = call.comm.state + fx.Int64(state_offset(call.block))
        found, _ = fx.atomic_cas(pointer(address, fx.Uint32, 4), call.entered, call.epoch, syncscope=DEVICE)
    call.found = found


@flyc.jit
def finish(call: Call) -> None:
    """Leave the call. Every thread calls it, once, after ``wait`` (or ``meet`` and its takes).

    If thread 0 found another epoch in the state than it read at entry, two launches used this channel at the same
    time, and the channel is poisoned. A call that failed by flags does not advance; after any failure ``recover``
    starts the epochs anew.
    """
    trace.end(call, "call")
    if call.ok & (fx.thread_idx.x == 0) & (call.found != call.entered):
        fail(call, "enter", call.comm.rank, call.entered, call.found, fx.Int32(REASONS.index("overlap")))


@flyc.jit
def fail(call: Call, phase: str, peer: Any, expected: Any, seen: Any, reason: Any) -> None:
    """Give up: write the record if no block has, poison this block's state, tell everybody to stop waiting.

    Called by the one thread that saw the fault; ``phase`` is a compile-time name from ``channel.PHASES``, ``peer``
    (i32), ``expected`` and ``seen`` (u32), ``reason`` (i32) an index of ``channel.REASONS``. The abort word is set at
    every peer, and in the own segment for the blocks beside this one: to write their state would let the waves of one
    block read different marks. Nothing else is written to a peer after a fault.
    """
    comm = call.comm
    failed = call.failed
    _, first = fx.atomic_cas(
        pointer(comm.state + fx.Int64(CLAIM), fx.Uint32, 4), fx.Uint32(0), fx.Uint32(1), syncscope=DEVICE
    )
    if first:
        values = (call.block, PHASES.index(phase), peer, expected, seen, reason)
        for word in fx.range_constexpr(len(values)):
            store_relaxed(comm.record + fx.Int64(4 * (word + 1)), fx.Uint32(values[word]))
        release()
        store_flag(comm.record, fx.Uint32(1))
    store_relaxed(comm.state + fx.Int64(state_offset(call.block) + _POISON), fx.Uint32(1))
    for j in fx.range_constexpr(comm.world):
        store_relaxed(segment(comm, j), fx.Uint64(1))
    failed[0] = fx.Int32(1)


@flyc.jit
def fail_first(call: Call, phase: str, missing: Any, seen: Any, reason: Any) -> None:
    """:func:`fail` for the first peer whose ``missing`` (u32, in the order of ``segment(comm, 1)``, …) is not zero.

    ``seen``: a u64 that was read of each; its high half is reported.
    """
    peer, word = peer_rank(call.comm, call.comm.world - 1), seen[-1]
    for j in fx.range_constexpr(call.comm.world - 2, 0, -1):
        here = missing[j - 1] != fx.Uint32(0)
        peer = here.select(peer_rank(call.comm, j), peer)
        word = here.select(seen[j - 1], word)
    fail(call, phase, peer, call.epoch, fx.Uint32(word >> fx.Uint64(32)), reason)
