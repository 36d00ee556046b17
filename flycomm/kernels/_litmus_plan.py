# SPDX-License-Identifier: Apache-2.0
"""What the litmus kernel and those who run it agree on: shapes, orders, where the words lie, how outcomes are coded.

The words of the racing lie in the staging of a channel, in areas of one place for each thread of the grid: ``DATA``,
``FLAG``, and two that ranks tell each other in what they saw. Places are a cache line apart.
"""

from __future__ import annotations

SHAPES = ("mp", "mp_far", "sb", "iriw", "coherence")
ORDERS = ("relaxed", "library", "fenced")

GROUP = 64  # threads that do the same: a wave, or two warps
PLACE_BYTES = 64
DATA, FLAG, TOLD = 0, 1, 2  # areas; what was seen in an even round is told in TOLD, in an odd one behind it
AREAS = 4

OLD_OLD, OLD_NEW, NEW_OLD, NEW_NEW, IMPOSSIBLE = range(5)  # what one actor saw: its first and its second read
SIGHTS = 5
OUTCOMES = SIGHTS * SIGHTS  # what both actors of a pair saw: own · SIGHTS + the partner's


def area_bytes(blocks: int, threads: int) -> int:
    return blocks * threads * PLACE_BYTES


def slot_bytes(world: int, blocks: int, threads: int) -> int:
    """Of a staging slot, of which a channel has two for each rank: ``kernel_channels={name: (blocks, slot_bytes)}``."""
    return -(-AREAS * area_bytes(blocks, threads) // (2 * world))


def actors(shape: str, threads: int) -> int:
    """How many threads of a block see something in a round: half of them where the others write."""
    return threads // 2 if shape in ("iriw", "coherence") else threads
