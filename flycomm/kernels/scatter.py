# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter: chunk r of everyone's message goes to rank r, which reduces what arrives. Phase one of two-shot.

By packets, sentinels (sums) or flags (any size, in pieces of a staging slot), on one-shot all-reduce's channels. Every
rank gets something from every peer in every call, since the chunks are equally long; so the proofs are one-shot's too.
Arguments of a launch: ``(comm, tag, source, out, count, stream)``: ``world`` chunks of ``count`` > 0 (i32) elements to
read, one after the other, and a 16-byte aligned address of ``count`` to write. ``aligned`` is fixed at compile time:
whether every chunk begins at a multiple of 16 bytes. ``out`` is disjoint from ``source``, or is this rank's own chunk.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

import flycomm.primitives as fc
from flycomm.channel import FRAGMENT_BYTES
from flycomm.dtypes import REDUCIBLE
from flycomm.kernels._launch import null_pointer, peers_placeholder
from flycomm.kernels._protocols import VERBS, exchange
from flycomm.primitives.launch_order import in_turn
from flycomm.primitives.peers import peer_rank
from flycomm.primitives.tensor import Share, post_share, take_share


def _post_to(verbs: Any, j: int, call: Any, value: Any, slot: Any) -> None:
    verbs.post_to(call, j, value, slot)


@cache
def build(protocol: str, reduction: str, aligned: bool) -> Callable[[int, str, int, int], tuple[Any, tuple[Any, ...]]]:
    """The builder for one protocol and reduction: ``(world, dtype, blocks, threads)`` → launcher and placeholders."""

    def build_one(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
        verbs = VERBS[protocol]
        peers = fc.peers_type(world, blocks)
        element = getattr(fx, REDUCIBLE[dtype].fx_name)
        alignment = FRAGMENT_BYTES if aligned else REDUCIBLE[dtype].num_bytes

        @flyc.kernel(name=f"reduce_scatter_{protocol}", known_block_size=[threads, 1, 1])
        def scatter(comm: peers, tag: fx.Int32, source: fx.Pointer, out: fx.Pointer, count: fx.Int32):
            in_turn(blocks, threads)
            start = fx.Int64(fx.ptrtoint(source))
            chunk_bytes = fx.Int64(count) * fx.Int64(REDUCIBLE[dtype].num_bytes)
            chunks = [
                Share(start + fx.Int64(peer_rank(comm, j)) * chunk_bytes, element, count, blocks, threads, alignment)
                for j in range(world)
            ]
            out_address = fx.Int64(fx.ptrtoint(out))
            call = verbs.begin(comm, tag)

            def reduced(call: Any, own: Any, slot: Any) -> Any:
                return verbs.take(call, own, slot, reduction)

            def post(call: Any, base: Any, n: Any) -> None:
                for j in fx.range_constexpr(1, world):
                    post_share(call, partial(_post_to, verbs, j), chunks[j], base, n)

            def take(call: Any, base: Any, n: Any) -> None:
                take_share(call, reduced, chunks[0], out_address, base, n)

            exchange(protocol, call, chunks[0], post, take)
            verbs.finish(call)

        @flyc.jit
        def launch(comm: peers, tag: fx.Int32, source: fx.Pointer, out: fx.Pointer, count: fx.Int32, stream: fx.Stream):
            scatter(comm, tag, source, out, count).launch(grid=(blocks,), block=(threads,), stream=stream)

        source, out = null_pointer(element, alignment), null_pointer(element, 16)
        return launch, (peers_placeholder(world, blocks), 0, source, out, 0, fx.Stream(None))

    return build_one
