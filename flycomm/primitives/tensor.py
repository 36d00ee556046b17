# SPDX-License-Identifier: Apache-2.0
"""Fragments of a flat tensor of any length: the last one may be partial. And a thread's share of them."""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.channel import FRAGMENT_BYTES
from flycomm.primitives.access import load_element, load_fragment, store_element, store_fragment


def _per_fragment(dtype: Any) -> int:
    return FRAGMENT_BYTES * 8 // dtype.width


def _zero(dtype: Any) -> Any:
    return 0.0 if dtype.is_float else 0


def num_fragments(count: Any, dtype: Any) -> Any:
    """Fragments (i32) that hold ``count`` (i32) elements of ``dtype``."""
    per = _per_fragment(dtype)
    return (count + fx.Int32(per - 1)) // fx.Int32(per)


@flyc.jit
def load_slot(address: Any, dtype: Any, slot: Any, count: Any, alignment: int = FRAGMENT_BYTES) -> Any:
    """Fragment ``slot`` (i32) of the ``count`` elements at the i64 ``address``; zeros past the end.

    The address has ``alignment`` (bytes), at least that of an element.
    """
    per = _per_fragment(dtype)
    first = slot * fx.Int32(per)
    base = address + fx.Int64(slot) * fx.Int64(FRAGMENT_BYTES)
    fragment = fx.Vector.filled(per, _zero(dtype), dtype)
    if first + fx.Int32(per) <= count:
        fragment = load_fragment(base, dtype, alignment)
    else:
        elements = []
        for e in fx.range_constexpr(per):
            element = dtype(_zero(dtype))
            if first + fx.Int32(e) < count:
                element = load_element(base + fx.Int64(e * dtype.width // 8), dtype)
            elements.append(element)
        fragment = fx.Vector.from_elements(elements, dtype)
    return fragment


@flyc.jit
def store_slot(address: Any, fragment: Any, slot: Any, count: Any) -> None:
    """Store fragment ``slot`` of the ``count`` elements at ``address``; nothing past the end is written."""
    dtype = fragment.dtype
    per = _per_fragment(dtype)
    first = slot * fx.Int32(per)
    base = address + fx.Int64(slot) * fx.Int64(FRAGMENT_BYTES)
    if first + fx.Int32(per) <= count:
        store_fragment(base, fragment)
    else:
        for e in fx.range_constexpr(per):
            if first + fx.Int32(e) < count:
                store_element(base + fx.Int64(e * dtype.width // 8), fragment[e])


class Share:
    """A thread's part of the flat tensor of ``count`` (i32) ``element``s at ``address`` (i64). Trace-time only.

    It is the fragments ``first + i * step``; ``step`` (compile-time) is the number of threads of the grid, so the map
    from fragment to thread is fixed by the grid. ``alignment`` in bytes.
    """

    def __init__(
        self, address: Any, element: Any, count: Any, blocks: int, threads: int, alignment: int = FRAGMENT_BYTES
    ):
        self.address = address
        self.element = element
        self.count = count
        self.first = fx.Int32(fx.block_idx.x) * fx.Int32(threads) + fx.Int32(fx.thread_idx.x)
        self.step = fx.Int32(blocks * threads)
        self.fragments = num_fragments(count, element)
        self.alignment = alignment


def load_share(share: Share, slot: Any) -> Any:
    """Fragment ``slot`` (i32) of the tensor, zeros past its end."""
    return load_slot(share.address, share.element, slot, share.count, share.alignment)


@flyc.jit
def post_share(call: Any, post: Any, share: Share, base: Any, n: Any) -> None:
    """``post(call, fragment, slot)`` of the fragments ``base + slot``, for this thread's slots below ``n`` (i32)."""
    slot = share.first
    while slot < n:
        post(call, load_share(share, base + slot), slot)
        slot = slot + share.step


@flyc.jit
def take_share(call: Any, take: Any, share: Share, out: Any, base: Any, n: Any) -> None:
    """``take(call, own fragment, slot)``, rounded to the element type, to the fragments ``base + slot`` at ``out``."""
    slot = share.first
    while slot < n:
        total = take(call, load_share(share, base + slot), slot)
        store_slot(out, total.to(share.element), base + slot, share.count)
        slot = slot + share.step
