# SPDX-License-Identifier: Apache-2.0
"""All-reduce, two-shot, by flags: everyone sends slice r to rank r, which reduces it and sends the result to everyone.

``2 (world - 1) / world`` times the message a rank instead of one-shot's ``world - 1``; two link latencies instead of
one: for messages that fill the link. PROTOCOLS "Two-shot"; a phase is a call of a flag channel with an epoch of its
own, and Theorem 1 of the docs' memory model holds for each. The same bits as one-shot, since a slice is reduced in
rank order by its owner alone. Any number of bytes, in pieces of ``world`` staging slots.

Arguments of a launch: ``(comm, tag, source, out, count, stream)``, as in ``all_reduce_one_shot``; ``out`` is ``source``
or disjoint from it.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

import flycomm.primitives as fc
from flycomm.dtypes import REDUCIBLE
from flycomm.kernels._launch import null_pointer, peers_placeholder
from flycomm.kernels._protocols import fragments_of_a_slot, in_pieces
from flycomm.primitives import fragment
from flycomm.primitives.call import Call, again
from flycomm.primitives.launch_order import in_turn
from flycomm.primitives.peers import peer_rank
from flycomm.primitives.tensor import Share, load_share, post_share, store_slot


def _slice(rank: Any, each: Any, n: Any) -> Any:
    """First fragment of rank ``rank``'s slice of ``n``, and how many it has: ``each``, fewer, or none (all i32)."""
    start = rank * each
    left = fx.arith.max(n - start, fx.Int32(0))
    return start, fx.arith.min(left, each)


@flyc.jit
def _scatter(call: Call, j: int, share: Share, base: Any, each: Any, n: Any) -> None:
    """Post the slice of rank ``(rank + j) % world`` to it."""

    def post(call: Any, value: Any, slot: Any) -> None:
        fragment.post_to(call, j, value, slot)

    start, length = _slice(peer_rank(call.comm, j), each, n)
    post_share(call, post, share, base + start, length)


@flyc.jit
def _reduce(first: Call, second: Call, reduction: str, share: Share, out: Any, base: Any, each: Any, n: Any) -> None:
    """Reduce the own slice, which arrived in ``first``, and post the result in ``second``."""
    start, length = _slice(second.comm.rank, each, n)
    slot = share.first
    while slot < length:
        at = base + start + slot
        total = fragment.take(first, load_share(share, at), slot, reduction).to(share.element)
        fragment.post(second, total, slot)
        store_slot(out, total, at, share.count)
        slot = slot + share.step


@flyc.jit
def _gather(call: Call, j: int, share: Share, out: Any, base: Any, each: Any, n: Any) -> None:
    """Write the reduced slice of rank ``(rank + j) % world``."""
    start, length = _slice(peer_rank(call.comm, j), each, n)
    slot = share.first
    while slot < length:
        store_slot(out, fragment.take_from(call, j, share.element, slot), base + start + slot, share.count)
        slot = slot + share.step


def _both_shots(call: Call, reduction: str, share: Share, out: Any) -> None:
    world = call.comm.world

    def piece(epoch: Any, ok: Any, last: Any, base: Any, n: Any) -> Any:
        first = again(call, epoch, ok, fx.Boolean(False))
        each = (n + fx.Int32(world - 1)) // fx.Int32(world)
        for j in range(1, world):
            _scatter(first, j, share, base, each, n)
        fc.arrive(first)
        fc.wait(first)
        second = again(call, first.epoch, first.ok, last)
        _reduce(first, second, reduction, share, out, base, each, n)
        fc.arrive(second)
        fc.wait(second)
        for j in range(1, world):
            _gather(second, j, share, out, base, each, n)
        return second.epoch, second.ok, second.found

    in_pieces(call, share.fragments, fragments_of_a_slot(call) * fx.Int32(world), piece)


@cache
def build(reduction: str) -> Callable[[int, str, int, int], tuple[Any, tuple[Any, ...]]]:
    """The builder for one reduction: ``(world, dtype, blocks, threads)`` → launcher and compile placeholders."""

    def build_one(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
        peers = fc.peers_type(world, blocks)
        element = getattr(fx, REDUCIBLE[dtype].fx_name)

        @flyc.kernel(name="all_reduce_two_shot", known_block_size=[threads, 1, 1])
        def two_shot(comm: peers, tag: fx.Int32, source: fx.Pointer, out: fx.Pointer, count: fx.Int32):
            in_turn(blocks, threads)
            share = Share(fx.Int64(fx.ptrtoint(source)), element, count, blocks, threads)
            call = fc.begin(comm, tag)
            _both_shots(call, reduction, share, fx.Int64(fx.ptrtoint(out)))
            fc.finish(call)

        @flyc.jit
        def launch(comm: peers, tag: fx.Int32, source: fx.Pointer, out: fx.Pointer, count: fx.Int32, stream: fx.Stream):
            two_shot(comm, tag, source, out, count).launch(grid=(blocks,), block=(threads,), stream=stream)

        null = null_pointer(element, 16)
        return launch, (peers_placeholder(world, blocks), 0, null, null, 0, fx.Stream(None))

    return build_one
