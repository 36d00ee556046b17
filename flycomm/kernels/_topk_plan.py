# SPDX-License-Identifier: Apache-2.0
"""The geometry of ``topk_local``, fixed by the classes (powers of two) of columns and of k."""

from __future__ import annotations

from dataclasses import dataclass

MAX_K = 2048
MAX_COLUMNS = 1 << 26
HEADER = 64  # bytes of a row's counters in the workspace; its candidates follow
PER_THREAD = {"row": 16, "batch": 32, "sample": 8, "candidates": 16, "held": 8}  # scores, at most
_SMALLEST_K = 64  # class; so few are put in order by comparing each with all
_RANK_BYTES = 8


@dataclass(frozen=True)
class Plan:
    """``blocks`` of ``threads`` a row. ``per_thread``: scores a thread holds at once; ``columns``: of the class."""

    blocks: int
    threads: int
    per_thread: int
    columns: int
    k: int  # class

    @property
    def index_bits(self) -> int:
        return self.columns.bit_length() - 1

    @property
    def row_bytes(self) -> int:
        """Of workspace, a row: none where one block does it."""
        return 0 if self.blocks == 1 else HEADER + PER_THREAD["candidates"] * self.threads * _RANK_BYTES


def k_class(k: int) -> int:
    """64, 128, … :data:`MAX_K`."""
    return max(_SMALLEST_K, 1 << (k - 1).bit_length())


def plan(small: bool, columns: int, k: int) -> Plan:
    """For rows of capacity ``columns`` (1 … :data:`MAX_COLUMNS`) and ``k`` (1 … :data:`MAX_K`).

    ``small``: for a target whose threads are few. A GPU's blocks have up to 1024 threads; up to 32 of them share a row.
    """
    least, most, blocks = (64, 256, 2) if small else (256, 1024, 32)
    chosen = k_class(k)
    wide = max(64, 1 << (columns - 1).bit_length())
    threads = min(most, max(least, wide // 8, chosen // (8 if small else 2)))
    if small and chosen < 1024:
        threads = least
    blocks = min(blocks, max(1, wide // (PER_THREAD["row"] * threads)))
    per_thread = min(PER_THREAD["row" if blocks == 1 else "batch"], max(1, wide // (blocks * threads)))
    return Plan(blocks, threads, per_thread, wide, chosen)
