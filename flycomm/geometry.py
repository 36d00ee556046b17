# SPDX-License-Identifier: Apache-2.0
"""Grids, blocks and protocols, fixed by (target, size class) and never by a message's length.

A size class is a power of two of bytes. A message uses the smallest class that holds it, so every rank that is given
the same number of bytes uses the same channel, protocol, grid and map from element to block.
"""

from __future__ import annotations

from dataclasses import dataclass

from flycomm.errors import UsageError

SMALLEST_CLASS = 4 << 10  # bytes
LARGEST_CLASS = 4 << 20


@dataclass(frozen=True)
class Geometry:
    """A grid of ``blocks`` blocks of ``threads`` threads."""

    blocks: int
    threads: int


SYNC = Geometry(1, 64)  # kernels that move no data


@dataclass(frozen=True)
class Entry:
    """What messages of the classes up to ``largest`` bytes use."""

    largest: int
    geometry: Geometry
    protocol: str


def _small(packets_to: int, then: str) -> tuple[Entry, ...]:
    """Up to 256 KiB: a fragment a thread, 256 threads a block; packets up to a class, another protocol above it."""
    return tuple(
        Entry(blocks * 4096, Geometry(blocks, 256), "packets" if blocks * 4096 <= packets_to else then)
        for blocks in (1, 2, 4, 8, 16, 32, 64)
    )


# cuda: measured on two H200s (docs/facts.md). rocm: modelled, not measured: packets where latency is all, flags above.
# host: few fibers, since a GPU's geometry would need hundreds of thousands; flags, which poll least.
TABLES: dict[str, tuple[Entry, ...]] = {
    "cuda": (
        *_small(packets_to=4 << 10, then="sentinel"),
        Entry(512 << 10, Geometry(64, 512), "sentinel"),
        Entry(LARGEST_CLASS, Geometry(128, 512), "sentinel"),
    ),
    "rocm": (*_small(packets_to=64 << 10, then="flags"), Entry(LARGEST_CLASS, Geometry(64, 256), "flags")),
    "host": (
        Entry(8 << 10, Geometry(1, 64), "flags"),
        Entry(LARGEST_CLASS, Geometry(2, 64), "flags"),
    ),
}
PROTOCOLS = ("flags", "packets", "sentinel")


def size_class(num_bytes: int) -> int:
    """The smallest class, in bytes, that holds a message of ``num_bytes``."""
    return max(SMALLEST_CLASS, 1 << max(0, num_bytes - 1).bit_length())


def entry(target: str, class_bytes: int) -> Entry:
    """What messages of this class use on ``target``."""
    for found in TABLES[target]:
        if class_bytes <= found.largest:
            return found
    raise UsageError(f"size class {class_bytes} bytes is over the largest, {LARGEST_CLASS}; send it in pieces")


def geometry(target: str, class_bytes: int) -> Geometry:
    """The grid that messages of this class use on ``target``."""
    return entry(target, class_bytes).geometry
