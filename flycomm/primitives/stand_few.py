# SPDX-License-Identifier: Apache-2.0
"""Where each of a few ranks stands, by looking at all of them: for a group of 32 lanes, sooner than a sort."""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives.block_scan import GROUP, read
from flycomm.primitives.nominate import global_rank

_AT_ONCE = 4  # looks at other ranks, between two looks at how many there are


@flyc.jit
def stand_few(comm: Any, chosen: Any, total: Any, granule: Any, low: bool) -> Any:
    """Two of 64 a lane: ranks with global ids (u64, 0 beyond ``total``), and where they stand (i32) from the greatest
    on: ``(rank, rank, place, place)``.

    ``chosen``: ``total`` (u32) local ranks, all different, in shared memory. Called by every lane of a group of 32,
    after a block barrier. No shuffles; a look at every rank by every lane, less than a sort by the same lanes.
    """
    lane = fx.Int32(fx.thread_idx.x) % fx.Int32(GROUP)
    at = [lane + fx.Int32(h * GROUP) for h in range(2)]
    held = [fx.Uint32(i) < total for i in at]
    mine = [one.select(read(chosen, i, fx.Uint64), fx.Uint64(0)) for one, i in zip(held, at, strict=True)]
    before = [fx.Int32(0), fx.Int32(0)]
    i = fx.Int32(0)
    while fx.Uint32(i) < total:
        for n in fx.range_constexpr(_AT_ONCE):
            other = read(chosen, i + fx.Int32(n), fx.Uint64)
            there = fx.Uint32(i + fx.Int32(n)) < total
            before = [
                count + (there & (other > one)).select(fx.Int32(1), fx.Int32(0))
                for count, one in zip(before, mine, strict=True)
            ]
        i = i + fx.Int32(_AT_ONCE)
    ranks = [one.select(global_rank(comm, r, granule, low), fx.Uint64(0)) for one, r in zip(held, mine, strict=True)]
    stands = [one.select(count, i) for one, count, i in zip(held, before, at, strict=True)]
    return ranks[0], ranks[1], stands[0], stands[1]
