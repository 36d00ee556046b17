# SPDX-License-Identifier: Apache-2.0
"""All-reduce, one-shot: everyone pushes everything to everyone, everyone sums. One kernel, three protocols.

flags      one signal a block and peer (PROTOCOLS "One-shot, flags"): any size
packets    every 4 bytes carry the epoch ("One-shot, packets (LL)"): small messages
sentinel   what has not arrived is the sentinel ("One-shot, sentinel (Lamport)"): small and medium messages

All give the same bits. The proofs are in the docs' memory model. One link latency; ``world - 1`` times the message a
rank (packets: twice that). Arguments of a launch: ``(comm, tag, source, out, count, stream)``: the channel's peers, the
call's tag (i32), 16-byte aligned addresses of ``count`` > 0 (i32) elements to read and to write, a raw stream handle.
``out`` is ``source`` or disjoint from it: each element is read again by the thread that writes it, before it writes.
"""

from collections.abc import Callable
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

import flycomm.primitives as fc
from flycomm.dtypes import REDUCIBLE
from flycomm.kernels._launch import null_pointer, peers_placeholder
from flycomm.primitives import fragment, packet, sentinel
from flycomm.primitives.tensor import load_slot, num_fragments, store_slot


def _build(
    name: str, protocol: Any, meet: Callable[..., Any], world: int, dtype: str, blocks: int, threads: int
) -> tuple[Any, tuple[Any, ...]]:
    peers = fc.peers_type(world, blocks)
    element = getattr(fx, REDUCIBLE[dtype].fx_name)
    step = blocks * threads

    @flyc.kernel(name=name, known_block_size=[threads, 1, 1])
    def one_shot(comm: peers, tag: fx.Int32, source: fx.Pointer, out: fx.Pointer, count: fx.Int32):
        source_address = fx.Int64(fx.ptrtoint(source))
        out_address = fx.Int64(fx.ptrtoint(out))
        call = protocol.begin(comm, tag)
        first = fx.Int32(fx.block_idx.x) * fx.Int32(threads) + fx.Int32(fx.thread_idx.x)
        fragments = num_fragments(count, element)

        slot = first
        while slot < fragments:
            protocol.post(call, load_slot(source_address, element, slot, count), slot)
            slot = slot + fx.Int32(step)
        meet(call, first, fx.Int32(step), fragments)
        slot = first
        while slot < fragments:
            total = protocol.take(call, load_slot(source_address, element, slot, count), slot)
            store_slot(out_address, total.to(element), slot, count)
            slot = slot + fx.Int32(step)
        protocol.finish(call)

    @flyc.jit
    def launch(comm: peers, tag: fx.Int32, source: fx.Pointer, out: fx.Pointer, count: fx.Int32, stream: fx.Stream):
        one_shot(comm, tag, source, out, count).launch(grid=(blocks,), block=(threads,), stream=stream)

    null = null_pointer(element, 16)
    return launch, (peers_placeholder(world, blocks), 0, null, null, 0, fx.Stream(None))


def _meet_by_flags(call: Any, first: Any, step: Any, count: Any) -> None:
    fc.arrive(call)
    fc.wait(call)


def _meet_by_packets(call: Any, first: Any, step: Any, count: Any) -> None:
    packet.meet(call)


def build_flags(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
    """The launcher and compile placeholders of one specialization."""
    return _build("all_reduce_one_shot", fragment, _meet_by_flags, world, dtype, blocks, threads)


def build_packets(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
    """The launcher and compile placeholders of one specialization."""
    return _build("all_reduce_packets", packet, _meet_by_packets, world, dtype, blocks, threads)


def build_sentinel(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
    """The launcher and compile placeholders of one specialization."""
    return _build("all_reduce_sentinel", sentinel, sentinel.meet, world, dtype, blocks, threads)
