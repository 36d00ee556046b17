# SPDX-License-Identifier: Apache-2.0
"""Grids, and the powers of two in which sizes are counted."""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST_CLASS = 4 << 10  # bytes


@dataclass(frozen=True)
class Geometry:
    """A grid of ``blocks`` blocks of ``threads`` threads. Fixed by a table's row, never by a message's length."""

    blocks: int
    threads: int


RESIDENT_THREADS = 1024  # that a compute unit can hold of kernels that wait: they are compiled for it
SYNC = Geometry(1, 64)  # kernels that move no data


def size_class(num_bytes: int) -> int:
    """The smallest power of two, and at least :data:`SMALLEST_CLASS`, that holds ``num_bytes``."""
    return max(SMALLEST_CLASS, 1 << max(0, num_bytes - 1).bit_length())
