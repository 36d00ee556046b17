# SPDX-License-Identifier: Apache-2.0
"""Classes and geometry of ``topk_exchange`` and ``topk_radix``: alike on all ranks, never by a live length."""

from __future__ import annotations

from dataclasses import dataclass

from flycomm import geometry
from flycomm.geometry import Geometry
from flycomm.primitives.candidates import WORD_BYTES
from flycomm.primitives.digits import HISTOGRAM_BYTES
from flycomm.primitives.winners import list_bytes

CLASSES = (64, 512, 1024, 2048)  # of k
MAX_ROWS = {64: 64, 512: 16, 1024: 16, 2048: 16}  # a launch that pushes
RADIX = "topk_radix"  # wire of the channel of the other algorithm, of every mode and every k
RADIX_BLOCKS = 64  # at most; a block does one row after the other
RESIDENT_THREADS = 512  # that a compute unit can hold of these kernels, or one block: they need many registers
_IN_REGISTERS = 16  # scores a thread
_THREADS = {64: 512, 512: 256, 1024: 512, 2048: 1024}
_SMALL_THREADS = {64: 64, 512: 64, 1024: 128, 2048: 256}
_RADIX_THREADS, _SMALL_RADIX_THREADS = 512, 64


@dataclass(frozen=True)
class Plan:
    """``threads`` a block, a block a row; ``columns``: the class of a row that fits a block's registers, else 0."""

    k: int  # class
    threads: int
    columns: int


def k_class(k: int) -> int:
    """The smallest of :data:`CLASSES` that holds ``k``."""
    return next(one for one in CLASSES if k <= one)


def plan(small: bool, columns: int, k: int) -> Plan:
    """For rows of up to ``columns`` local scores. ``small``: for a target whose threads are few."""
    chosen = k_class(k)
    return plan_of(columns, chosen, (_SMALL_THREADS if small else _THREADS)[chosen])


def radix_plan(small: bool, columns: int, k: int) -> Plan:
    """The same for ``topk_radix``, whose channel has one geometry for every ``k``."""
    return plan_of(columns, k_class(k), _SMALL_RADIX_THREADS if small else _RADIX_THREADS)


def plan_of(columns: int, k: int, threads: int) -> Plan:
    """With so many threads; ``k`` is a class."""
    wide = max(64, 1 << max(0, columns - 1).bit_length())
    return Plan(k, threads, wide if wide <= _IN_REGISTERS * threads else 0)


def channel_name(mode: str, k: int) -> str:
    """The wire of a call's channel: one for each class of ``k``, and another for mode "owner", which resets slots."""
    return f"topk{'_owner' if mode == 'owner' else ''}_{k_class(k)}"


def lane_channels(small: bool, rows: int, k: int) -> dict[str, tuple[Geometry, int]]:
    """Name → grid and bytes of a source, of the channels of a lane for calls of up to ``rows`` rows of up to ``k``."""
    found = {}
    for one in CLASSES[: CLASSES.index(k_class(k)) + 1]:
        most = min(rows, MAX_ROWS[one])
        threads = (_SMALL_THREADS if small else _THREADS)[one]
        for mode in ("all", "owner"):
            found[channel_name(mode, one)] = Geometry(most, threads), channel_bytes(most, one)
    blocks = min(rows, RADIX_BLOCKS)
    threads = _SMALL_RADIX_THREADS if small else _RADIX_THREADS
    found[RADIX] = Geometry(blocks, threads), blocks * (HISTOGRAM_BYTES + list_bytes(k_class(k)))
    return found


def resident_threads(threads: int) -> int:
    """What a kernel with blocks of ``threads`` is compiled for."""
    return max(RESIDENT_THREADS, threads)


def as_counted(grid: Geometry) -> Geometry:
    """A grid with the threads that it takes of a budget by which a compute unit holds ``geometry.RESIDENT_THREADS``."""
    return Geometry(grid.blocks, grid.threads * geometry.RESIDENT_THREADS // resident_threads(grid.threads))


def channel_bytes(rows: int, k: int) -> int:
    """Of a staging slot of a channel for up to ``rows`` rows of up to ``k``: what a source fills in one call."""
    return rows * k_class(k) * WORD_BYTES


def list_class(capacity: int, blocks: int) -> int:
    """The class of ``k`` that a channel of :data:`RADIX` has room for; 0 if there is none."""
    return next((one for one in CLASSES if blocks * (HISTOGRAM_BYTES + list_bytes(one)) == capacity), 0)
