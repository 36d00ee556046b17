# SPDX-License-Identifier: Apache-2.0
"""One round of a litmus test: where its locations are, when each thread begins, and what it saw."""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.epoch import arrived
from flycomm.kernels._litmus_plan import GROUP, IMPOSSIBLE, NEW_OLD, OLD_NEW, PLACE_BYTES
from flycomm.primitives.access import clock
from flycomm.primitives.call import Call
from flycomm.primitives.peers import peer_rank, segment


class Round:
    """One round, as a thread sees it. Trace-time only.

    ``call``: its call of the channel; ``previous`` (u32): the epoch of the round before; ``first`` (bool): the round
    before was not of this launch; ``own``, ``partner``, ``target`` (i64): the areas in this rank's memory, in that of
    the rank that sees the other half of the outcome, and in that of the rank that is written to; ``area`` (bytes);
    ``seed``, ``spread`` (i32, i64): each group of threads begins up to so many ticks late.
    """

    def __init__(self, call: Call, previous: Any, first: Any, areas: tuple[Any, Any, Any], area: int, late: Any):
        self.call = call
        self.previous = previous
        self.first = first
        self.own, self.partner, self.target = areas
        self.area = area
        self.seed, self.spread = late
        threads, _, _ = fx.gpu.known_block_size()
        self.threads = threads
        self.thread = fx.Int32(fx.thread_idx.x)
        self.block = call.block

    def place(self, areas: Any, kind: int, thread: Any) -> Any:
        """Address (i64) of the location of ``thread`` (i32) in an area."""
        index = fx.Int64(self.block * fx.Int32(self.threads) + thread)
        return areas + fx.Int64(kind * self.area) + index * fx.Int64(PLACE_BYTES)

    def partner_rank(self) -> Any:
        """The partner's rank (i32)."""
        comm, offset = self.call.comm, self.own - segment(self.call.comm, 0)
        rank = comm.rank
        for j in range(1, comm.world):
            rank = (self.partner == segment(comm, j) + offset).select(peer_rank(comm, j), rank)
        return rank

    def sight(self, first: Any, second: Any) -> Any:
        """The code (u32) of two epochs (u32) that were read."""
        known = self._is_known(first) & self._is_known(second)
        new = [(epoch == self.call.epoch).select(fx.Uint32(1), fx.Uint32(0)) for epoch in (first, second)]
        return known.select(new[0] * fx.Uint32(NEW_OLD) + new[1] * fx.Uint32(OLD_NEW), fx.Uint32(IMPOSSIBLE))

    def _is_known(self, epoch: Any) -> Any:
        """Of this round or of the one before: all that was written before is visible once the ranks have met."""
        behind = arrived(epoch, self.call.epoch) == fx.Boolean(False)
        return (epoch == self.call.epoch) | (epoch == self.previous) | (self.first & behind)


@flyc.jit
def stagger(one: Round) -> None:
    """Let each group of threads begin at a time of its own, up to ``spread`` late."""
    group = fx.Uint32(one.thread // fx.Int32(GROUP)) + fx.Uint32(one.block) * fx.Uint32(64)
    mixed = one.call.epoch * fx.Uint32(0x9E3779B1) + group * fx.Uint32(0x85EBCA6B)
    mixed = mixed + fx.Uint32(one.call.comm.rank) * fx.Uint32(0x27D4EB2F)
    mixed = (mixed ^ fx.Uint32(one.seed) ^ (mixed >> fx.Uint32(15))) * fx.Uint32(0xC2B2AE35)
    ticks = (one.spread * fx.Int64(mixed >> fx.Uint32(16))) >> fx.Int64(16)
    if ticks > fx.Int64(0):
        started = clock()
        now = started
        while now - started < ticks:
            now = clock()
