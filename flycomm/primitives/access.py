# SPDX-License-Identifier: Apache-2.0
"""Typed global memory by address, with the order and the scope of every access in its name.

Addresses are i64. Nothing here synchronises threads; nothing here may read peer-written memory through a read-only,
invariant or scalar load, which is why every pointer is made from an integer at the access.
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from flydsl._mlir.dialects import llvm

from flycomm.channel import FRAGMENT_BYTES
from flycomm.primitives._override import overridable

DEVICE = "agent"  # scope of what only this device's blocks share; every target knows the name
_RELAXED = fx.AtomicOrdering.Monotonic


def pointer(address: Any, dtype: Any, alignment: int) -> Any:
    """A global-memory pointer to ``dtype`` at the i64 ``address``, which the caller promises is so aligned (bytes)."""
    return fx.inttoptr(fx.PointerType.get(dtype.ir_type, fx.AddressSpace.Global, alignment), address)


def load_fragment(address: Any, dtype: Any, alignment: int = FRAGMENT_BYTES) -> Any:
    """16 bytes from an address with ``alignment`` (bytes), as a vector of ``dtype``. Plain: order comes from elsewhere.

    With a smaller alignment than 16 the compiler makes several loads of it.
    """
    count = FRAGMENT_BYTES * 8 // dtype.width
    return fx.generic_load(pointer(address, dtype, alignment), dtype=dtype, count=count)


def store_fragment(address: Any, fragment: Any) -> None:
    """Store a vector of 16 bytes to a 16-byte aligned address. A plain store: it may land late and in any order."""
    fx.generic_store(pointer(address, fragment.dtype, FRAGMENT_BYTES), fragment)


@overridable
def push_fragment(address: Any, fragment: Any) -> None:
    """:func:`store_fragment` to a peer's staging; published by :func:`wait_own_stores`, a block barrier and a flag."""
    store_fragment(address, fragment)


@overridable
def pull_fragment(address: Any, dtype: Any) -> Any:
    """:func:`load_fragment` from the own staging, after an :func:`acquire` that saw the peer's flag."""
    return load_fragment(address, dtype)


@overridable
def store_pair(address: Any, low: Any, high: Any) -> None:
    """Two relaxed u64 at system scope to a 16-byte aligned address: each whole, the two in any order."""
    store_relaxed(address, low)
    store_relaxed(address + fx.Int64(8), high)


@overridable
def load_pair(address: Any) -> Any:
    """Two relaxed u64 at system scope from a 16-byte aligned address: each whole, the two at any moment."""
    return load_relaxed(address), load_relaxed(address + fx.Int64(8))


def load_element(address: Any, dtype: Any) -> Any:
    """One element, plain."""
    return fx.generic_load(pointer(address, dtype, dtype.width // 8), dtype=dtype)


def store_element(address: Any, value: Any) -> None:
    """One element, plain."""
    fx.generic_store(pointer(address, value.dtype, value.dtype.width // 8), value)


def load_relaxed(address: Any, dtype: Any = fx.Uint64) -> Any:
    """An atomic load that orders nothing, at system scope: what polls use."""
    return fx.generic_load(pointer(address, dtype, dtype.width // 8), dtype=dtype, memory_order=_RELAXED)


def store_relaxed(address: Any, value: Any) -> None:
    """An atomic store that orders nothing, at system scope."""
    fx.generic_store(pointer(address, value.dtype, value.dtype.width // 8), value, memory_order=_RELAXED)


@overridable
def store_flag(address: Any, value: Any) -> None:
    """An atomic store at system scope that no reader sees before the data it announces.

    The data: the stores to peer-mapped memory of every thread of the block, the caller's too, that called
    :func:`wait_own_stores` before a block barrier that the caller passed. To publish ordinary cached memory as well,
    call :func:`release` first.
    """
    fx.generic_store(
        pointer(address, value.dtype, value.dtype.width // 8), value, memory_order=fx.AtomicOrdering.Release
    )


@overridable
def wait_own_stores() -> None:
    """Until this thread's earlier stores to peers can no longer be overtaken by a flag stored after a block barrier.

    Every thread that stored calls it before that barrier: on AMD the count of stores in flight is kept per wave.
    """
    fx.memory_fence(ordering=fx.AtomicOrdering.Release)


@overridable
def land_own_stores() -> None:
    """Until this thread's earlier stores are in memory: none of them lands on what a peer stores there later.

    For stores to the own segment that a peer may write once it has seen a relaxed word, which carries nothing. The word
    may be stored by another thread of the block, after a block barrier.
    """
    fx.memory_fence(ordering=fx.AtomicOrdering.Release)


def release() -> None:
    """Publish every earlier write of this thread at system scope, cached memory too."""
    fx.memory_fence(ordering=fx.AtomicOrdering.Release)


@overridable
def acquire(address: Any) -> None:
    """Order this thread's later reads after its relaxed load of the u64 at ``address``, at system scope.

    Called once, after a poll of ``address`` has succeeded: an acquire in the poll would empty caches at every turn.
    """
    fx.memory_fence(ordering=fx.AtomicOrdering.Acquire)


def clock() -> Any:
    """Ticks (i64) of the device's steady clock, at ``Capabilities.clock_hz``; the same for every block of a device."""
    return fx.Int64(llvm.call_intrinsic(fx.Int64.ir_type, "llvm.readsteadycounter", [], [], []))
