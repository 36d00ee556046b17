# SPDX-License-Identifier: Apache-2.0
"""Grids and blocks, fixed by (target, size class) and never by a message's length.

A size class is a power of two of bytes. A message uses the smallest class that holds it, so every rank that is given
the same number of bytes uses the same channel, grid and map from element to block.
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

# (largest class in bytes, geometry), ascending. cuda: measured on two H200s (docs/facts.md): a fragment a thread, 256
# threads, up to 64 blocks, so that eight virtual ranks stay resident on two GPUs. rocm: the same until it has been
# measured. host: few fibers, since a GPU's geometry would need hundreds of thousands.
_GPU: tuple[tuple[int, Geometry], ...] = (
    *((blocks * 4096, Geometry(blocks, 256)) for blocks in (1, 2, 4, 8, 16, 32)),
    (LARGEST_CLASS, Geometry(64, 256)),
)
_HOST: tuple[tuple[int, Geometry], ...] = (
    (8 << 10, Geometry(1, 64)),
    (LARGEST_CLASS, Geometry(2, 64)),
)
_TABLES = {"cuda": _GPU, "rocm": _GPU, "host": _HOST}

GPU_GEOMETRIES: tuple[Geometry, ...] = tuple(geometry for _, geometry in _GPU)


def size_class(num_bytes: int) -> int:
    """The smallest class, in bytes, that holds a message of ``num_bytes``."""
    return max(SMALLEST_CLASS, 1 << max(0, num_bytes - 1).bit_length())


def geometry(target: str, class_bytes: int) -> Geometry:
    """The grid that messages of this class use on ``target``."""
    for largest, found in _TABLES[target]:
        if class_bytes <= largest:
            return found
    raise UsageError(f"size class {class_bytes} bytes is over the largest, {LARGEST_CLASS}; send it in pieces")
