# SPDX-License-Identifier: Apache-2.0
"""Which block does which tile of which stage: one rule for Python tables and traced kernels.

A *tile* is the least that is dealt out: what one worker (a warp, or a group of lanes) makes at a time. A stage of
``tiles`` tiles is dealt out over the ``blocks`` blocks of a grid, either way with at most ``share`` tiles a block:

- ``"contiguous"``: block ``b`` has the tiles ``b * share, …``; neighbours in memory stay together;
- ``"round_robin"``: block ``b`` has ``b, b + blocks, …``; what early tiles need is spread over all blocks.

Only compile-time numbers that are equal on all ranks decide, so block ``b`` of every rank has the same tiles: what a
tile posts is taken by the paired block of each peer. Nothing here orders, waits or moves data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flydsl.expr as fx

from flycomm.errors import UsageError

ORDERS = ("contiguous", "round_robin")
Task = tuple[str, int]  # stage, tile


def share(tiles: int, blocks: int) -> int:
    """The most tiles that a block has."""
    if tiles < 1 or blocks < 1:
        raise UsageError(f"{tiles} tiles over {blocks} blocks; pass at least one of both")
    return -(-tiles // blocks)


def tile_at(tiles: int, blocks: int, block: Any, position: Any, order: str = "contiguous") -> Any:
    """The tile at ``position`` in the list of ``block``, ints or traced i32. It is one only if it is below ``tiles``
    and ``position`` is below :func:`share`."""
    if order not in ORDERS:
        raise UsageError(f"order={order!r} is not one of {', '.join(ORDERS)}; pass one of these")
    return block * share(tiles, blocks) + position if order == ORDERS[0] else position * blocks + block


def deal(tiles: int, blocks: int, order: str = "contiguous") -> tuple[tuple[int, ...], ...]:
    """The tiles of every block. Those with none come last."""
    dealt = [[tile_at(tiles, blocks, b, p, order) for p in range(share(tiles, blocks))] for b in range(blocks)]
    return tuple(tuple(tile for tile in one if tile < tiles) for one in dealt)


def task_table(stages: Mapping[str, int], blocks: int, order: str = "contiguous") -> tuple[tuple[Task, ...], ...]:
    """block → its (stage, tile) in the order in which it does them; ``stages``: name → tiles, in their order.

    The schedule of a launch on one page: for tests, and to look at.
    """
    dealt = {stage: deal(tiles, blocks, order) for stage, tiles in stages.items()}
    return tuple(tuple((stage, tile) for stage in stages for tile in dealt[stage][b]) for b in range(blocks))


def turns(tiles: int, blocks: int, workers: int) -> int:
    """How often each of a block's ``workers`` takes a tile: the same number for all, so that a block stays together."""
    return -(-share(tiles, blocks) // workers)


def walk(tiles: int, blocks: int, workers: int, worker: Any, order: str = "contiguous") -> list[tuple[Any, Any]]:
    """A worker's tiles in a kernel: ``(tile, inside)`` for each of the :func:`turns`, i32 and bool.

    ``worker`` (i32) of the block takes every ``workers``-th tile of its list. Where it has none left ``inside`` is
    false and ``tile`` is 0: it may load, so that the lanes of a warp stay together, and must store and post nothing.
    Called by every thread; ``tiles``, ``blocks`` and ``workers`` are compile-time ints.
    """
    each = range(turns(tiles, blocks, workers))
    return [own_tile(tiles, blocks, worker + fx.Int32(turn * workers), order) for turn in each]


def own_tile(tiles: int, blocks: int, position: Any, order: str = "contiguous") -> tuple[Any, Any]:
    """The tile at ``position`` (i32) of this block's list in a kernel: ``(tile, inside)`` as of :func:`walk`."""
    tile = fx.Int32(tile_at(tiles, blocks, fx.Int32(fx.block_idx.x), position, order))
    inside = (position < fx.Int32(share(tiles, blocks))) & (tile < fx.Int32(tiles))
    return inside.select(tile, fx.Int32(0)), inside
