# SPDX-License-Identifier: Apache-2.0
"""Records of what a block does when, in kernels that are compiled to make them; nothing in all others.

Whether a kernel makes records is fixed when it is compiled (``Specialization.traced``), so these functions add not one
instruction to one that does not. The clock is read by thread 0 of the block, whose moves stand for the block's: what is
between two of its records holds for that thread. A kernel of your own marks its stages with :func:`stage`.

Where records go: a channel's *region* is ordinary device memory, for each block a count and then ``room`` records of 32
bytes: the clock (i64), kind and value (u32), a name (16 bytes). Its address and its room stand before the state of the
channel; address 0 means that nobody listens, so a graph may replay a traced kernel when tracing has ended. A record
that finds no room is counted and dropped. Names travel in the records: code that comes from a cache, or is replayed,
needs no table of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.channel import TRACE_BYTES
from flycomm.errors import UsageError
from flycomm.primitives.access import DEVICE, clock, load_element, pointer, store_element

RECORD_BYTES = 32
NAME_BYTES = 16
KINDS = ("mark", "begin", "end", "stage")
_NAME = 16  # offset in a record
_ROOM = 8  # offset of the room before a channel's state, from the address's

_compiling = ContextVar("flycomm.traced", default=False)


def region_bytes(blocks: int, room: int) -> int:
    """Of a channel's region: each block's records, after one record's place that begins with their count."""
    return blocks * (1 + room) * RECORD_BYTES


def block_offset(block: Any, room: Any) -> Any:
    """In a region, of the u32 count of a block; its records follow ``RECORD_BYTES`` later."""
    return block * ((1 + room) * RECORD_BYTES)


@contextmanager
def compiled_in(traced: bool) -> Iterator[None]:
    """Kernels that this thread compiles meanwhile make records, or make none."""
    token = _compiling.set(traced)
    try:
        yield
    finally:
        _compiling.reset(token)


def listen(call: Any) -> None:
    """Find the region of a call that begins. Every thread calls it, once a kernel; :func:`~.call.begin` does."""
    call.trace = None
    if _compiling.get():
        head = call.comm.state - fx.Int64(TRACE_BYTES)
        region, room = load_element(head, fx.Int64), load_element(head + fx.Int64(_ROOM), fx.Int32)
        own = region + fx.Int64(block_offset(fx.Int64(call.block), fx.Int64(room)))
        call.trace = (region != fx.Int64(0)) & (fx.thread_idx.x == 0), own, room


def mark(call: Any, name: str, value: Any = 0) -> None:
    """Record one moment. ``name``: at most 16 ASCII characters, compile-time; ``value`` (i32 or u32): of a slot, say.

    Called by any thread, at any place; only where thread 0 calls it is something recorded. Orders nothing. The same
    holds for the other functions here.
    """
    _record(call, "mark", name, value)


def begin(call: Any, name: str, value: Any = 0) -> None:
    """Record that something begins that the next :func:`end` of the same name ends; they may nest."""
    _record(call, "begin", name, value)


def end(call: Any, name: str) -> None:
    """Record that what :func:`begin` named has ended."""
    _record(call, "end", name, 0)


def stage(call: Any, name: str) -> None:
    """Record that the stage before has ended and this one begins; the last ends with the call.

    ``call``: what ``fc.begin`` gave; ``name`` as for :func:`mark`. For kernels of several stages, between them.
    """
    _record(call, "stage", name, 0)


def _record(call: Any, kind: str, name: str, value: Any) -> None:
    if len(name.encode()) > NAME_BYTES or not name.isascii():
        raise UsageError(f"{name!r} is not at most {NAME_BYTES} ASCII characters; name the record shorter")
    if call.trace is not None:
        _append(*call.trace, KINDS.index(kind), name.encode().ljust(NAME_BYTES, b"\0"), fx.Int32(value))


@flyc.jit
def _append(here: Any, own: Any, room: Any, kind: int, name: bytes, value: Any) -> None:
    if here:
        now = clock()
        count = fx.Int32(fx.atomic_add(pointer(own, fx.Int32, 4), fx.Int32(1), syncscope=DEVICE))
        if count < room:
            at = own + (fx.Int64(count) + fx.Int64(1)) * fx.Int64(RECORD_BYTES)
            store_element(at, now)
            store_element(at + fx.Int64(8), fx.Int32(kind))
            store_element(at + fx.Int64(12), value)
            for half in fx.range_constexpr(2):
                word = int.from_bytes(name[8 * half : 8 * half + 8], "little")
                store_element(at + fx.Int64(_NAME + 8 * half), fx.Uint64(word))
