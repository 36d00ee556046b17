# SPDX-License-Identifier: Apache-2.0
"""All-reduce, one-shot: everyone pushes everything to everyone, everyone reduces. One kernel, three protocols.

flags      one signal a block and peer (PROTOCOLS "One-shot, flags"): any size, in pieces of a staging slot
packets    every 4 bytes carry the epoch ("One-shot, packets (LL)"): small messages
sentinel   what has not arrived is the sentinel ("One-shot, sentinel (Lamport)"): small and medium messages, sums

All give the same bits. The proofs are in the docs' memory model. One link latency; ``world - 1`` times the message a
rank (packets: twice that). Arguments of a launch: ``(comm, tag, source, out, count, stream)``: the channel's peers, the
call's tag (i32), 16-byte aligned addresses of ``count`` > 0 (i32) elements to read and to write, a raw stream handle.
By packets and sentinels the message fits a staging slot. ``out`` is ``source`` or disjoint from it: each element is
read again by the thread that writes it, before it writes.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

import flycomm.primitives as fc
from flycomm.dtypes import REDUCIBLE
from flycomm.kernels._launch import null_pointer, peers_placeholder
from flycomm.kernels._protocols import VERBS, exchange
from flycomm.primitives.launch_order import in_turn
from flycomm.primitives.tensor import Share, post_share, take_share


@cache
def build(protocol: str, reduction: str) -> Callable[[int, str, int, int], tuple[Any, tuple[Any, ...]]]:
    """The builder for one protocol and reduction: ``(world, dtype, blocks, threads)`` → launcher and placeholders."""

    def build_one(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
        verbs = VERBS[protocol]
        peers = fc.peers_type(world, blocks)
        element = getattr(fx, REDUCIBLE[dtype].fx_name)

        @flyc.kernel(name=f"all_reduce_{protocol}", known_block_size=[threads, 1, 1])
        def one_shot(comm: peers, tag: fx.Int32, source: fx.Pointer, out: fx.Pointer, count: fx.Int32):
            in_turn(blocks, threads)
            share = Share(fx.Int64(fx.ptrtoint(source)), element, count, blocks, threads)
            out_address = fx.Int64(fx.ptrtoint(out))
            call = verbs.begin(comm, tag)

            def reduced(call: Any, own: Any, slot: Any) -> Any:
                return verbs.take(call, own, slot, reduction)

            def post(call: Any, base: Any, n: Any) -> None:
                post_share(call, verbs.post, share, base, n)

            def take(call: Any, base: Any, n: Any) -> None:
                take_share(call, reduced, share, out_address, base, n)

            exchange(protocol, call, share, post, take)
            verbs.finish(call)

        @flyc.jit
        def launch(comm: peers, tag: fx.Int32, source: fx.Pointer, out: fx.Pointer, count: fx.Int32, stream: fx.Stream):
            one_shot(comm, tag, source, out, count).launch(grid=(blocks,), block=(threads,), stream=stream)

        null = null_pointer(element, 16)
        return launch, (peers_placeholder(world, blocks), 0, null, null, 0, fx.Stream(None))

    return build_one
