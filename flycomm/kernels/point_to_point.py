# SPDX-License-Identifier: Apache-2.0
"""``put_signal`` and ``wait_signal``: counted signals between two ranks, one thread.

The n-th put to a peer stores n into the peer's word; the m-th wait on a peer returns once that word is m or more. The
counters live in device memory, so both may be captured and replayed. Arguments of a launch: ``(comm, channel, peer,
segment, stream)``: user channel and the peer's rank (i32), the address of the peer's segment.
"""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

import flycomm.primitives as fc
from flycomm.channel import received_offset, sent_offset, signal_offset
from flycomm.epoch import next_epoch
from flycomm.kernels._launch import null_pointer, peers_placeholder
from flycomm.primitives import trace
from flycomm.primitives.access import load_element, release, store_element
from flycomm.primitives.call import Call, fail


@flyc.jit
def _put(call: Call, channel: Any, peer: Any, target: Any) -> None:
    if call.live & (fx.thread_idx.x == 0):
        counter = call.comm.state + fx.Int64(sent_offset(channel, peer))
        count = next_epoch(load_element(counter, fx.Uint32))
        release()
        fc.signal.signal(target + fx.Int64(signal_offset(channel, call.comm.rank)), count, fx.Uint32(0))
        store_element(counter, count)
    trace.end(call, "call")


@flyc.jit
def _wait(call: Call, channel: Any, peer: Any) -> None:
    if call.live & (fx.thread_idx.x == 0):
        comm = call.comm
        counter = comm.state + fx.Int64(received_offset(channel, peer))
        count = next_epoch(load_element(counter, fx.Uint32))
        own = fc.segment(comm, 0)
        reason, seen = fc.signal.wait(own + fx.Int64(signal_offset(channel, peer)), count, comm.limit, own)
        if reason == fx.Int32(0):
            store_element(counter, count)
        else:
            fail(call, "wait_signal", peer, count, fc.signal.epoch_of(seen), reason)
    trace.end(call, "call")


def build_put_signal(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
    """The launcher and compile placeholders of ``put_signal``; ``dtype`` is not used."""
    peers = fc.peers_type(world, blocks)

    @flyc.kernel(known_block_size=[threads, 1, 1])
    def put_signal(comm: peers, channel: fx.Int32, peer: fx.Int32, target: fx.Pointer):
        _put(fc.begin(comm), channel, peer, fx.Int64(fx.ptrtoint(target)))

    @flyc.jit
    def launch(comm: peers, channel: fx.Int32, peer: fx.Int32, target: fx.Pointer, stream: fx.Stream):
        put_signal(comm, channel, peer, target).launch(grid=(blocks,), block=(threads,), stream=stream)

    return launch, _placeholders(world, blocks)


def build_wait_signal(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
    """The launcher and compile placeholders of ``wait_signal``; ``dtype`` is not used."""
    peers = fc.peers_type(world, blocks)

    @flyc.kernel(known_block_size=[threads, 1, 1])
    def wait_signal(comm: peers, channel: fx.Int32, peer: fx.Int32):
        _wait(fc.begin(comm), channel, peer)

    @flyc.jit
    def launch(comm: peers, channel: fx.Int32, peer: fx.Int32, target: fx.Pointer, stream: fx.Stream):
        wait_signal(comm, channel, peer).launch(grid=(blocks,), block=(threads,), stream=stream)

    return launch, _placeholders(world, blocks)


def _placeholders(world: int, blocks: int) -> tuple[Any, ...]:
    return peers_placeholder(world, blocks), 0, 0, null_pointer(fx.Int32, 4), fx.Stream(None)
