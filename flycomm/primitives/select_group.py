# SPDX-License-Identifier: Apache-2.0
"""Sorting and selecting by one group of 32 lanes, in registers: a warp, or half of one. Bitonic sorts (Batcher).

An element keeps its index; a step exchanges it with the element whose index differs in one bit, so steps over the
lowest five bits are shuffles. The greatest comes first; 0 comes last and serves as padding.
"""

from collections.abc import Sequence
from typing import Any

import flydsl.expr as fx

from flycomm.primitives.block_scan import GROUP
from flycomm.primitives.norm import fold


def _exchanged(value: Any, distance: int) -> Any:
    """The value of the lane ``lane ^ distance``."""
    halves = [fx.Uint32(value)] if value.dtype.width == 32 else [fx.Uint32(value), fx.Uint32(value >> fx.Uint64(32))]
    halves = [fx.Uint32(fx.gpu.shuffle_xor(half, distance, GROUP)) for half in halves]
    return halves[0] if len(halves) == 1 else fx.Uint64(halves[0]) | (fx.Uint64(halves[1]) << fx.Uint64(32))


def lane_steps(value: Any, index: Any, size: int, first: int) -> Any:
    """The steps of distance ``first``, ``first / 2``, … 1 of the stage that makes runs of ``size`` sorted."""
    distance = first
    while distance:
        other = _exchanged(value, distance)
        falling = (index & fx.Int32(size)) == fx.Int32(0)
        early = (index & fx.Int32(distance)) == fx.Int32(0)
        value = ((value > other) == (falling == early)).select(value, other)
        distance //= 2
    return value


def sorted_runs(value: Any, index: Any) -> Any:
    """Runs of 32 elements, one a lane, sorted downwards and upwards in turn."""
    size = 2
    while size <= GROUP:
        value = lane_steps(value, index, size, size // 2)
        size *= 2
    return value


def sort_group(low: Any, high: Any) -> tuple[Any, Any]:
    """Sort 64 ranks, two a lane, over a group of 32: lane ``i`` gives and gets those of index ``i`` and ``32 + i``.

    No barrier and no memory. Every lane of the group makes the call.
    """
    lane = fx.Int32(fx.thread_idx.x) % fx.Int32(GROUP)
    low, high = sorted_runs(low, lane), sorted_runs(high, lane + fx.Int32(GROUP))
    low, high = (low > high).select(low, high), (low > high).select(high, low)
    half = GROUP // 2
    return lane_steps(low, lane, 2 * GROUP, half), lane_steps(high, lane + fx.Int32(GROUP), 2 * GROUP, half)


def _merged(mine: Sequence[Any], theirs: Sequence[Any], room: int) -> list[Any]:
    """The greatest ``room`` of two falling runs of one length, falling; all of both if they are no more. A power of two
    each."""
    turned = theirs[::-1]
    values = [*mine, *turned]
    if len(mine) == room:
        values = [(a > b).select(a, b) for a, b in zip(mine, turned, strict=True)]
    distance = len(values) // 2
    while distance:
        for i in (i for i in range(len(values)) if not i & distance):
            early, late = values[i], values[i + distance]
            values[i], values[i + distance] = (early > late).select(early, late), (early > late).select(late, early)
        distance //= 2
    return values


def _sorted(values: Sequence[Any]) -> list[Any]:
    """A lane's own values, a power of two of them, falling."""
    half = len(values) // 2
    return _merged(_sorted(values[:half]), _sorted(values[half:]), len(values)) if half else list(values)


def top_of_group(ranks: Sequence[Any], k: int) -> list[Any]:
    """The ``k`` greatest ranks of a group of 32 lanes, falling, the same in every lane; 0 behind the last.

    ``ranks``: this lane's (u64, 0 for none), equally many in every lane, at most 16, so up to 512 in all; ``k``
    (compile-time) is at most 16. Ranks differ (:mod:`flycomm.primitives.rank`), so where scores tie the lower or the
    higher index wins, as ``rank_of`` was told, and the result depends neither on the lanes' nor on their order.

    Every lane of the group calls it. No memory, no barrier, orders nothing. Lanes sort what they hold, then merge with
    their neighbours five times; the shuffles of a merge do not wait for each other. For rows that one group can hold:
    :mod:`flycomm.primitives.select` finds the same elements of a row of any length, by a block, for any ``k``, with
    counts in shared memory and block barriers, and leaves them in no order.
    """
    room = 1 << (k - 1).bit_length()
    length = min(room, 1 << (len(ranks) - 1).bit_length())
    padded = [*ranks, *[fx.Uint64(0)] * (-len(ranks) % length)]
    runs = [_sorted(padded[first : first + length]) for first in range(0, len(padded), length)]
    best: list[Any] = fold(runs, lambda mine, theirs: _merged(mine, theirs, room))
    for distance in (16, 8, 4, 2, 1):
        best = _merged(best, [_exchanged(one, distance) for one in best], room)
    return best[:k]
