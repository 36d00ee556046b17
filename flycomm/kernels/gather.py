# SPDX-License-Identifier: Apache-2.0
"""All-gather: everyone sends all it has to everyone; nothing is computed. Moves bytes, so any dtype.

By packets (small) or flags (any size, in pieces of a staging slot); the exchange is one-shot all-reduce's, on the same
channels, and so are its proofs. Arguments of a launch: ``(comm, tag, source, out, count, width, stream)``: a 16-byte
aligned address of ``count`` > 0 elements to read, and one to write ``world * count`` to, as rows: ``width`` elements of
rank 0, ``width`` of rank 1, …, then the next row of each. ``width`` divides ``count`` (both i32) and is equal to it to
concatenate along the first dimension.

``unit`` is fixed at compile time: the largest of :data:`UNITS` that divides a row's bytes and the alignment of ``out``;
elements are of ``min(unit, 4)`` bytes. ``out`` is disjoint from ``source``, or ``source`` is this rank's part of it. A
call that fails writes bytes of ones: NaN in every float, -1 in every integer.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

import flycomm.primitives as fc
from flycomm.channel import FRAGMENT_BYTES
from flycomm.kernels._launch import null_pointer, peers_placeholder
from flycomm.kernels._protocols import VERBS, exchange
from flycomm.primitives.access import store_element, store_fragment
from flycomm.primitives.call import Call
from flycomm.primitives.launch_order import in_turn
from flycomm.primitives.tensor import Share, load_share, post_share

UNITS = (16, 4, 2, 1)  # bytes that are written at once
_ELEMENTS = {4: fx.Uint32, 2: fx.Uint16, 1: fx.Uint8}


class _Rows:
    """Where the result goes: ``width`` (i32) elements of each rank in a row, at ``address`` (i64)."""

    def __init__(self, address: Any, unit: int, width: Any):
        self.address = address
        self.unit = unit
        self.width = width


def _address(call: Call, rows: _Rows, source: int, index: Any, width: Any, num_bytes: int) -> Any:
    """Of item ``index`` of rank ``source``; ``width`` items of ``num_bytes`` bytes in a row."""
    row, column = index // width, index % width
    place = (fx.Int64(row) * fx.Int64(call.comm.world) + fx.Int64(source)) * fx.Int64(width) + fx.Int64(column)
    return rows.address + place * fx.Int64(num_bytes)


@flyc.jit
def _write(call: Call, rows: _Rows, share: Share, source: int, value: Any, at: Any) -> None:
    """Fragment ``at`` of what rank ``source`` sent."""
    if fx.const_expr(rows.unit == FRAGMENT_BYTES):
        per = FRAGMENT_BYTES * 8 // share.element.width
        store_fragment(_address(call, rows, source, at, rows.width // fx.Int32(per), FRAGMENT_BYTES), value)
    else:
        per = FRAGMENT_BYTES // rows.unit
        for e in fx.range_constexpr(per):
            index = at * fx.Int32(per) + fx.Int32(e)
            if index < share.count:
                store_element(_address(call, rows, source, index, rows.width, rows.unit), value[e])


@flyc.jit
def _write_share(call: Call, collect: Any, share: Share, rows: _Rows, base: Any, n: Any) -> None:
    slot = share.first
    while slot < n:
        own = load_share(share, base + slot)
        terms, ok = collect(call, own, slot)
        for source in fx.range_constexpr(call.comm.world):
            ones = fx.Vector.filled(own.numel, (1 << share.element.width) - 1, share.element)
            _write(call, rows, share, source, ok.select(terms[source], ones), base + slot)
        slot = slot + share.step


@cache
def build(protocol: str, unit: int) -> Callable[[int, str, int, int], tuple[Any, tuple[Any, ...]]]:
    """The builder for "packets" or "flags" and one unit; ``dtype`` is not used."""

    def build_one(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
        verbs = VERBS[protocol]
        peers = fc.peers_type(world, blocks)
        element = _ELEMENTS[min(unit, 4)]

        @flyc.kernel(name=f"all_gather_{protocol}", known_block_size=[threads, 1, 1])
        def gather(comm: peers, tag: fx.Int32, source: fx.Pointer, out: fx.Pointer, count: fx.Int32, width: fx.Int32):
            in_turn(blocks, threads)
            share = Share(fx.Int64(fx.ptrtoint(source)), element, count, blocks, threads)
            rows = _Rows(fx.Int64(fx.ptrtoint(out)), unit, width)
            call = verbs.begin(comm, tag)

            def post(call: Any, base: Any, n: Any) -> None:
                post_share(call, verbs.post, share, base, n)

            def take(call: Any, base: Any, n: Any) -> None:
                _write_share(call, verbs.collect, share, rows, base, n)

            exchange(protocol, call, share, post, take)
            verbs.finish(call)

        @flyc.jit
        def launch(
            comm: peers,
            tag: fx.Int32,
            source: fx.Pointer,
            out: fx.Pointer,
            count: fx.Int32,
            width: fx.Int32,
            stream: fx.Stream,
        ):
            gather(comm, tag, source, out, count, width).launch(grid=(blocks,), block=(threads,), stream=stream)

        source, out = null_pointer(element, 16), null_pointer(element, unit)
        return launch, (peers_placeholder(world, blocks), 0, source, out, 0, 1, fx.Stream(None))

    return build_one
