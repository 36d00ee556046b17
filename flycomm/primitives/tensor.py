# SPDX-License-Identifier: Apache-2.0
"""Fragments of a flat tensor of any length: the last one may be partial."""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.channel import FRAGMENT_BYTES
from flycomm.primitives.access import load_element, load_fragment, store_element, store_fragment


def _per_fragment(dtype: Any) -> int:
    return FRAGMENT_BYTES * 8 // dtype.width


def num_fragments(count: Any, dtype: Any) -> Any:
    """Fragments (i32) that hold ``count`` (i32) elements of ``dtype``."""
    per = _per_fragment(dtype)
    return (count + fx.Int32(per - 1)) // fx.Int32(per)


@flyc.jit
def load_slot(address: Any, dtype: Any, slot: Any, count: Any) -> Any:
    """Fragment ``slot`` (i32) of the ``count`` elements at the 16-byte aligned i64 ``address``; zeros past the end."""
    per = _per_fragment(dtype)
    first = slot * fx.Int32(per)
    base = address + fx.Int64(slot) * fx.Int64(FRAGMENT_BYTES)
    fragment = fx.Vector.filled(per, 0.0, dtype)
    if first + fx.Int32(per) <= count:
        fragment = load_fragment(base, dtype)
    else:
        elements = []
        for e in fx.range_constexpr(per):
            element = dtype(0.0)
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
