# SPDX-License-Identifier: Apache-2.0
"""Shared memory of a block's selection, and what its threads add up and combine over it.

For blocks of a multiple of 32 threads, at most 1024. FlyDSL's own block scan folds the sums of warps one by one in
every thread, which takes most of a selection's time in a block of 1024; here a second scan over lanes does it.
"""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

GROUP = 32  # lanes that shuffle together: a warp, or half of one
DIGIT = 11  # bits
BINS = 1 << DIGIT


class Scratch:
    """A block's shared memory for selecting, from the kernel's ``fx.SharedAllocator``: 8.4 KiB. Trace-time only."""

    def __init__(self, shared: Any):
        self.histogram = shared.allocate(fx.Array[fx.Uint32, BINS]).peek().ptr
        self.totals = shared.allocate(fx.Array[fx.Uint32, 2 * GROUP]).peek().ptr
        self.found = shared.allocate(fx.Array[fx.Uint32, 4]).peek().ptr


def read(array: Any, index: Any, dtype: Any = fx.Uint32) -> Any:
    """Element ``index`` of an array in shared memory."""
    return fx.generic_load(array + index, dtype=dtype)


def write(array: Any, index: Any, value: Any) -> None:
    fx.generic_store(array + index, value)


def _group_scan(value: Any, lane: Any) -> Any:
    """Inclusive sums (u32) over the lanes of a group."""
    for distance in (1, 2, 4, 8, 16):
        before = fx.Uint32(fx.gpu.shuffle_up(value, distance, GROUP))
        value = value + (lane >= fx.Int32(distance)).select(before, fx.Uint32(0))
    return value


@flyc.jit
def block_scan(value: Any, scratch: Scratch, threads: int) -> Any:
    """The sum of ``value`` (u32) over the threads before this one, and over all: ``(before, total)``.

    Contains one block barrier; another must lie between two scans.
    """
    thread = fx.Int32(fx.thread_idx.x)
    lane, group = thread % fx.Int32(GROUP), thread // fx.Int32(GROUP)
    totals = scratch.totals
    within = _group_scan(value, lane)
    if lane == fx.Int32(GROUP - 1):
        write(totals, group, within)
    fx.gpu.barrier()
    groups = threads // GROUP
    mine = (lane < fx.Int32(groups)).select(lane, fx.Int32(0))
    of_groups = _group_scan((lane < fx.Int32(groups)).select(read(totals, mine), fx.Uint32(0)), lane)
    previous = (group > fx.Int32(0)).select(group - fx.Int32(1), fx.Int32(0))
    base = fx.Uint32(fx.gpu.shuffle_idx(of_groups, previous, GROUP))
    total = fx.Uint32(fx.gpu.shuffle_idx(of_groups, GROUP - 1, GROUP))
    return within - value + (group > fx.Int32(0)).select(base, fx.Uint32(0)), total


def group_value(value: Any, lane: Any) -> Any:
    """The ``value`` (32 bits) of ``lane`` (i32, below 32) of this thread's group. Every lane of the group calls it.

    ``shuffle_idx`` counts lanes from the warp's first on, whatever its width: of a warp of 64, the upper group's are 32
    to 63.
    """
    first = fx.Int32(fx.thread_idx.x) % fx.Int32(fx.gpu.num_warp_threads()) // fx.Int32(GROUP) * fx.Int32(GROUP)
    return fx.gpu.shuffle_idx(value, first + lane, GROUP)


def group_or(value: Any) -> Any:
    """The OR of ``value`` (u32) over the lanes of a group."""
    for distance in (16, 8, 4, 2, 1):
        value = value | fx.Uint32(fx.gpu.shuffle_xor(value, distance, GROUP))
    return value


def group_max(value: Any) -> Any:
    """The greatest ``value`` (u32) of the lanes of a group."""
    for distance in (16, 8, 4, 2, 1):
        value = fx.arith.max(value, fx.Uint32(fx.gpu.shuffle_xor(value, distance, GROUP)))
    return value


@flyc.jit
def clear(scratch: Scratch, threads: int) -> None:
    """Before the first refinement of a kernel. A block barrier must follow."""
    for i in fx.range_constexpr(BINS // threads):
        write(scratch.histogram, fx.Int32(fx.thread_idx.x) + fx.Int32(i * threads), fx.Uint32(0))
