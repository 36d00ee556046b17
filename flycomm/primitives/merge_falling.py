# SPDX-License-Identifier: Apache-2.0
"""The greatest of two falling lists of one length, by a block: one half of a bitonic merge (Batcher).

One list is in shared memory, the other in the threads' registers. Of element ``i`` and the other list's element
``k - 1 - i`` the greater stays: these are the greatest ``k`` of both, and rise and fall once. Steps of a distance of 32
and more exchange through shared memory, up to three of them between two block barriers; the last five are shuffles.
"""

from collections.abc import Sequence
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives.block_scan import GROUP, read, write
from flycomm.primitives.select_group import lane_steps

_STEPS = 3  # of which a thread keeps the elements in registers


def _exchanged(values: Sequence[Any]) -> list[Any]:
    """Elements at even distances, falling as far as exchanges among them make it."""
    found = list(values)
    distance = len(found) // 2
    while distance:
        for i in (i for i in range(len(found)) if not i & distance):
            left, right = found[i], found[i + distance]
            found[i], found[i + distance] = (left > right).select(left, right), (left > right).select(right, left)
        distance //= 2
    return found


@flyc.jit
def _far(ranks: Any, count: int, step: int, several: int, threads: int) -> None:
    """The exchanges among each ``several`` elements that are ``step`` apart."""
    i = fx.Int32(fx.thread_idx.x)
    while i < fx.Int32(count // several):
        first = (i // fx.Int32(step)) * fx.Int32(step * several) + i % fx.Int32(step)
        at = [first + fx.Int32(n * step) for n in range(several)]
        for place, rank in zip(at, _exchanged([read(ranks, place, fx.Uint64) for place in at]), strict=True):
            write(ranks, place, rank)
        i = i + fx.Int32(threads)
    fx.gpu.barrier()


@flyc.jit
def _near(ranks: Any, count: int, threads: int) -> None:
    at = [fx.Int32(fx.thread_idx.x) + fx.Int32(n * threads) for n in range(count // threads)]
    held = [read(ranks, i, fx.Uint64) for i in at]
    for i, rank in zip(at, held, strict=True):
        write(ranks, i, lane_steps(rank, i, 2 * count, GROUP // 2))
    fx.gpu.barrier()


@flyc.jit
def _keep_greater(ranks: Any, theirs: Sequence[Any], pairs: Sequence[Any], count: int) -> None:
    places = [fx.Int32(count - 1 - h) - pair * fx.Int32(2) for pair in pairs for h in range(2)]
    held = [read(ranks, place, fx.Uint64) for place in places]
    for place, mine, other in zip(places, held, theirs, strict=True):
        write(ranks, place, (mine > other).select(mine, other))
    fx.gpu.barrier()


def merge_falling(ranks: Any, theirs: Sequence[Any], pairs: Sequence[Any], count: int, threads: int) -> None:
    """Of the ``count`` falling ranks (u64) in shared memory and as many falling others the greatest, falling, in place.

    ``count`` (compile-time) is a power of two, at least 64 and a multiple of ``threads``. ``theirs``: two a pair, those
    of index ``2 * pair`` and ``2 * pair + 1``, for this thread's ``pairs`` (i32). Every thread of the block calls it,
    after a block barrier that follows the writes; it ends with one. Lists that do not fall leave no other ranks than
    theirs, in no order.
    """
    _keep_greater(ranks, theirs, pairs, count)
    distance = count // 2
    while distance >= GROUP:
        steps = min(_STEPS, (distance // GROUP).bit_length())
        several = 1 << steps
        _far(ranks, count, 2 * distance // several, several, threads)
        distance //= several
    _near(ranks, count, threads)
