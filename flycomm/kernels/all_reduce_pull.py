# SPDX-License-Identifier: Apache-2.0
"""All-reduce of symmetric memory: every rank reads its peers' tensors where they lie. No staging.

A pull reads what a peer will write again, so it needs barriers that a push does not (docs, memory model): one before
the reads, since the peer's tensor must be ready; and one after them, since the peer may then write to it. In place the
second has to come before the *own* write, because the peers' reads of it may be late: a piece is read into registers,
then the barrier, then the write. Barriers are calls of a flag channel, block-paired: block b reads, and writes, only
the fragments that are block b's on every rank. After a failed barrier nothing is written in place, since a late peer
may still read: the memory is then part input, part result.

Arguments of a launch: ``(comm, tag, memory, out, count, stream)``: ``memory`` is :func:`addresses_type`'s struct, the
16-byte aligned address of ``count`` > 0 (i32) elements on every rank; ``out`` is the own one exactly if ``in_place``.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

import flycomm.primitives as fc
from flycomm.channel import FRAGMENT_BYTES
from flycomm.dtypes import REDUCIBLE
from flycomm.kernels._launch import null_pointer, peers_placeholder
from flycomm.kernels._protocols import in_pieces
from flycomm.primitives.access import pull_fragment
from flycomm.primitives.call import Call, again
from flycomm.primitives.launch_order import in_turn
from flycomm.primitives.peers import address_of, addresses_type, in_rank_order
from flycomm.primitives.reduce import reduce_in_rank_order
from flycomm.primitives.tensor import Share, store_slot

_HELD = 4  # fragments that a thread holds between two barriers, in place


@flyc.jit
def _reduced(call: Call, reduction: str, share: Share, memory: Any, at: Any, end: Any) -> Any:
    """Fragment ``at`` of every rank's tensor, reduced in rank order; NaN past ``end`` or if the call failed.

    The memory is whole fragments to its end.
    """
    value = fx.Vector.filled(FRAGMENT_BYTES * 8 // share.element.width, float("nan"), share.element)
    if call.ok & (at < end):
        offset = fx.Int64(at) * fx.Int64(FRAGMENT_BYTES)
        own, *theirs = [pull_fragment(address_of(memory, j) + offset, share.element) for j in range(call.comm.world)]
        terms = in_rank_order(call.comm, own, theirs)
        value = reduce_in_rank_order(terms, reduction).to(share.element)
    return value


@flyc.jit
def _to_another(call: Call, reduction: str, share: Share, memory: Any, out: Any) -> None:
    """Between the two barriers: every fragment of this thread to ``out``."""
    slot = share.first
    while slot < share.fragments:
        store_slot(out, _reduced(call, reduction, share, memory, slot, share.fragments), slot, share.count)
        slot = slot + share.step


@flyc.jit
def _write(call: Call, share: Share, out: Any, value: Any, slot: Any, end: Any) -> None:
    if call.ok & (slot < end):
        store_slot(out, value, slot, share.count)


def _in_place(call: Call, entry: Call, reduction: str, share: Share, memory: Any) -> None:
    out = address_of(memory, 0)

    def piece(epoch: Any, ok: Any, last: Any, base: Any, n: Any) -> Any:
        before = again(call, epoch, ok, last)
        slots = [base + share.first + share.step * fx.Int32(i) for i in range(_HELD)]
        values = [_reduced(before, reduction, share, memory, slot, base + n) for slot in slots]
        fc.arrive(before)
        fc.wait(before, pulled=True)
        for slot, value in zip(slots, values, strict=True):
            _write(before, share, out, value, slot, base + n)
        return before.epoch, before.ok, before.found

    in_pieces(call, share.fragments, share.step * fx.Int32(_HELD), piece, entry)


@cache
def build(reduction: str, in_place: bool) -> Callable[[int, str, int, int], tuple[Any, tuple[Any, ...]]]:
    """The builder for one reduction: ``(world, dtype, blocks, threads)`` → launcher and compile placeholders."""

    def build_one(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
        peers, memory_type = fc.peers_type(world, blocks), addresses_type(world)
        element = getattr(fx, REDUCIBLE[dtype].fx_name)

        @flyc.kernel(name="all_reduce_pull", known_block_size=[threads, 1, 1])
        def pull(comm: peers, tag: fx.Int32, memory: memory_type, out: fx.Pointer, count: fx.Int32):
            in_turn(blocks, threads)
            share = Share(address_of(memory, 0), element, count, blocks, threads)
            call = fc.begin(comm, tag)
            entry = again(call, call.entered, call.live, fx.Boolean(False))
            fc.arrive(entry)
            fc.wait(entry)
            if fx.const_expr(in_place):
                _in_place(call, entry, reduction, share, memory)
            else:
                _to_another(entry, reduction, share, memory, fx.Int64(fx.ptrtoint(out)))
                leave = again(call, entry.epoch, entry.ok, fx.Boolean(True))
                fc.arrive(leave)
                fc.wait(leave, pulled=True)
                call.ok = leave.ok
                call.found = leave.found
            fc.finish(call)

        @flyc.jit
        def launch(
            comm: peers, tag: fx.Int32, memory: memory_type, out: fx.Pointer, count: fx.Int32, stream: fx.Stream
        ):
            pull(comm, tag, memory, out, count).launch(grid=(blocks,), block=(threads,), stream=stream)

        nowhere = memory_type(**{f"address{j}": 0 for j in range(world)})
        return launch, (peers_placeholder(world, blocks), 0, nowhere, null_pointer(element, 16), 0, fx.Stream(None))

    return build_one
