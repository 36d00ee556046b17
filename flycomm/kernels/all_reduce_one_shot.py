# SPDX-License-Identifier: Apache-2.0
"""All-reduce, one-shot, with flags: everyone pushes everything to everyone, one signal, one sum.

PROTOCOLS "One-shot, flags"; the proof is in docs/memory_model.md. One link latency; ``world - 1`` times the message a
rank. Arguments of a launch: ``(comm, tag, source, out, count, stream)``: the channel's peers, the call's tag (i32),
16-byte aligned addresses of ``count`` (i32) elements to read and to write, a raw stream handle. ``out`` is ``source``
or disjoint from it: each element is read again by the thread that writes it, before it writes.
"""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

import flycomm.primitives as fc
from flycomm.dtypes import REDUCIBLE
from flycomm.kernels._launch import null_pointer, peers_placeholder
from flycomm.primitives.tensor import load_slot, num_fragments, store_slot


def build(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
    """The launcher and compile placeholders of one specialization."""
    peers = fc.peers_type(world, blocks)
    element = getattr(fx, REDUCIBLE[dtype].fx_name)

    @flyc.kernel(known_block_size=[threads, 1, 1])
    def all_reduce_one_shot(comm: peers, tag: fx.Int32, source: fx.Pointer, out: fx.Pointer, count: fx.Int32):
        source_address = fx.Int64(fx.ptrtoint(source))
        out_address = fx.Int64(fx.ptrtoint(out))
        call = fc.begin(comm, tag)
        first = fx.Int32(fx.block_idx.x) * fx.Int32(threads) + fx.Int32(fx.thread_idx.x)
        fragments = num_fragments(count, element)

        slot = first
        while slot < fragments:
            fc.post(call, load_slot(source_address, element, slot, count), slot)
            slot = slot + fx.Int32(blocks * threads)
        fc.arrive(call)
        fc.wait(call)
        slot = first
        while slot < fragments:
            total = fc.take(call, load_slot(source_address, element, slot, count), slot)
            store_slot(out_address, total.to(element), slot, count)
            slot = slot + fx.Int32(blocks * threads)
        fc.finish(call)

    @flyc.jit
    def launch(comm: peers, tag: fx.Int32, source: fx.Pointer, out: fx.Pointer, count: fx.Int32, stream: fx.Stream):
        all_reduce_one_shot(comm, tag, source, out, count).launch(grid=(blocks,), block=(threads,), stream=stream)

    null = null_pointer(element, 16)
    return launch, (peers_placeholder(world, blocks), 0, null, null, 0, fx.Stream(None))
