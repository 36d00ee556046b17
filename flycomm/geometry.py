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
ROW_THREADS = 512  # the same of kernels whose blocks, of up to half of that, hold a row in registers
EARLY_THREADS = 24 * RESIDENT_THREADS  # of the largest grid that may take its places before the one ahead of it ends
SYNC = Geometry(1, 64)  # kernels that move no data


def row_threads(threads: int) -> int:
    """That a compute unit can hold of a kernel whose blocks of ``threads`` threads hold a row in registers."""
    return ROW_THREADS if threads <= ROW_THREADS // 2 else RESIDENT_THREADS


def size_class(num_bytes: int) -> int:
    """The smallest power of two, and at least :data:`SMALLEST_CLASS`, that holds ``num_bytes``."""
    return max(SMALLEST_CLASS, 1 << max(0, num_bytes - 1).bit_length())
