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


def _gpu(packets_to: int, sentinel_to: int) -> tuple[Entry, ...]:
    """A fragment a thread, 256 threads, up to 64 blocks: eight virtual ranks stay resident on two GPUs."""
    classes = [(blocks * 4096, Geometry(blocks, 256)) for blocks in (1, 2, 4, 8, 16, 32, 64)]
    classes += [(size << 10, Geometry(64, 256)) for size in (512, 1024, 2048, 4096)]
    return tuple(
        Entry(size, grid, "packets" if size <= packets_to else "sentinel" if size <= sentinel_to else "flags")
        for size, grid in classes
    )


# cuda: measured on two H200s (docs/facts.md). rocm: modelled, not measured: packets where latency is all, flags above.
# host: few fibers, since a GPU's geometry would need hundreds of thousands; flags, which poll least.
TABLES: dict[str, tuple[Entry, ...]] = {
    "cuda": _gpu(packets_to=128 << 10, sentinel_to=2 << 20),
    "rocm": _gpu(packets_to=64 << 10, sentinel_to=0),
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
