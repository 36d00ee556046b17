# SPDX-License-Identifier: Apache-2.0
"""Two kernels that do as little as a launch, and as a flag, can. Built like those of :mod:`flycomm.kernels`.

They are measured, never shipped: nothing here is part of a collective.
"""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.kernels import Specialization
from flycomm.kernels._launch import null_pointer
from flycomm.primitives.access import clock, pointer, store_element

WARM_ROUNDS = 100
ROUNDS = 1000  # timed
_POLLS = 64  # between two looks at the clock


def empty(blocks: int, threads: int) -> Specialization:
    """Does nothing. Arguments of a launch: ``(anchor, stream)``; ``anchor`` is any device address."""
    return Specialization("floor_empty", _build_empty, 1, "", blocks, threads)


def ping_pong() -> Specialization:
    """A flag goes to and fro between two ranks, by volatile stores and loads, one thread on each.

    Arguments of a launch: ``(own, peer, result, limit, serves, anchor, stream)``: addresses (i64) of the u32 word that
    the peer writes here and of the one that this rank writes there, both zero; where to leave the ticks (i64) of
    ``ROUNDS`` round trips, or -1 if the peer did not come within ``limit`` ticks (i64); whether this rank begins (i32).
    """
    return Specialization("floor_ping_pong", _build_ping_pong, 2, "", 1, 32)


def _build_empty(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
    @flyc.kernel(known_block_size=[threads, 1, 1])
    def floor_empty(anchor: fx.Pointer) -> None:
        pass

    @flyc.jit
    def launch(anchor: fx.Pointer, stream: fx.Stream) -> None:
        floor_empty(anchor).launch(grid=(blocks,), block=(threads,), stream=stream)

    return launch, (null_pointer(fx.Int32, 4), fx.Stream(None))


def _load(address: Any) -> Any:
    return fx.generic_load(pointer(address, fx.Uint32, 4), dtype=fx.Uint32, volatile=True)


def _store(address: Any, value: Any) -> None:
    fx.generic_store(pointer(address, fx.Uint32, 4), value, volatile=True)


def _build_ping_pong(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
    @flyc.kernel(known_block_size=[threads, 1, 1])
    def floor_ping_pong(own: fx.Int64, peer: fx.Int64, result: fx.Int64, limit: fx.Int64, serves: fx.Int32) -> None:
        if fx.thread_idx.x == 0:
            started = clock()
            came = fx.Boolean(True)
            turn = fx.Uint32(1)
            while came & (turn <= fx.Uint32(WARM_ROUNDS + ROUNDS)):
                if turn == fx.Uint32(WARM_ROUNDS + 1):
                    started = clock()
                if serves != fx.Int32(0):
                    _store(peer, turn)
                asked = clock()
                seen = _load(own)
                while came & (seen != turn):
                    polls = fx.Int32(0)
                    while (seen != turn) & (polls < fx.Int32(_POLLS)):
                        seen = _load(own)
                        polls = polls + fx.Int32(1)
                    if seen != turn:
                        came = clock() - asked < limit
                if serves == fx.Int32(0):
                    _store(peer, turn)
                turn = turn + fx.Uint32(1)
            ticks = clock() - started
            store_element(result, came.select(ticks, fx.Int64(-1)))

    @flyc.jit
    def launch(
        own: fx.Int64,
        peer: fx.Int64,
        result: fx.Int64,
        limit: fx.Int64,
        serves: fx.Int32,
        anchor: fx.Pointer,
        stream: fx.Stream,
    ) -> None:
        floor_ping_pong(own, peer, result, limit, serves).launch(grid=(blocks,), block=(threads,), stream=stream)

    return launch, (fx.Int64(0), fx.Int64(0), fx.Int64(0), fx.Int64(0), 0, null_pointer(fx.Int32, 4), fx.Stream(None))
