# SPDX-License-Identifier: Apache-2.0
"""One row of scores in global memory as ranks (:mod:`flycomm.primitives.rank`): 16 bytes at a time where it may.

Columns at and beyond the row's length are never read. A *unit* is what one load reads: 16 bytes of a row whose every
start is 16-byte aligned (``wide``), else one element.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.channel import FRAGMENT_BYTES
from flycomm.primitives.access import load_element, load_fragment
from flycomm.primitives.rank import ordered_key, rank_of
from flycomm.primitives.select import Fold
from flycomm.primitives.tensor import load_slot


class ScoreRow:
    """``length`` (i32) scores of type ``dtype`` at the i64 ``address``; ``index_bits``, ``low``: as for ``rank_of``.

    Trace-time only. ``per_unit``: scores a unit.
    """

    def __init__(self, address: Any, dtype: Any, length: Any, wide: bool, index_bits: int, low: bool):
        self.address = address
        self.dtype = dtype
        self.bits = fx.Uint32 if dtype.width == 32 else fx.Uint16  # a float in a register may lose denormals
        self.length = length
        self.wide = wide
        self.per_unit = FRAGMENT_BYTES * 8 // dtype.width if wide else 1
        self.index_bits = index_bits
        self.low = low


def f32_bits(row: ScoreRow, unit: Any) -> list[Any]:
    """The bits (u32) of the f32s that a unit's scores are. A bf16 is the upper half of one."""
    if row.dtype is fx.Float32:
        return [unit[e] for e in range(row.per_unit)] if row.wide else [unit]
    if row.dtype is fx.BFloat16 and row.wide:
        words = unit.bitcast(fx.Uint32)
        return [half for i in range(4) for half in (words[i] << fx.Uint32(16), words[i] & fx.Uint32(0xFFFF0000))]
    parts = [unit[e] for e in range(row.per_unit)] if row.wide else [unit]
    if row.dtype is fx.BFloat16:
        return [fx.Uint32(part) << fx.Uint32(16) for part in parts]
    return [fx.Uint16(part).bitcast(fx.Float16).to(fx.Float32).bitcast(fx.Uint32) for part in parts]


def ranks_of(row: ScoreRow, units: Sequence[Any], places: Sequence[Any]) -> list[Any]:
    """The ranks of loaded units, ``places[i]`` (i32) being the place of ``units[i]`` in the row; 0 beyond it."""
    ranks = []
    for unit, place in zip(units, places, strict=True):
        first = place * fx.Int32(row.per_unit)
        for e, bits in enumerate(f32_bits(row, unit)):
            index = first + fx.Int32(e)
            rank = rank_of(ordered_key(bits), index, row.index_bits, row.low)
            ranks.append((index < row.length).select(rank, fx.Uint64(0)))
    return ranks


def load_whole(row: ScoreRow, places: Sequence[Any]) -> list[Any]:
    """The units at ``places`` (i32), all of which the row has to their ends, as loaded."""
    if row.wide:
        return [load_fragment(row.address + fx.Int64(place) * fx.Int64(FRAGMENT_BYTES), row.bits) for place in places]
    width = row.bits.width // 8
    return [load_element(row.address + fx.Int64(place) * fx.Int64(width), row.bits) for place in places]


def nothing(row: ScoreRow) -> Any:
    """A unit of zeros."""
    return fx.Vector.filled(row.per_unit, 0, row.bits) if row.wide else row.bits(0)


@flyc.jit
def _load_before(row: ScoreRow, place: Any, end: Any, otherwise: Any) -> Any:
    unit = otherwise
    if place < end:
        (unit,) = load_whole(row, [place])
    return unit


@flyc.jit
def load_units(row: ScoreRow, places: Sequence[Any]) -> Any:
    """The units at ``places`` (i32, rising), as loaded; zeros beyond the row. Nothing here waits for the loads."""
    end = row.length // fx.Int32(row.per_unit)  # the first that the row does not have to its end
    units = [nothing(row) for _ in places]
    if places[-1] < end:  # no branch between one load and the next
        units = load_whole(row, places)
    else:
        last = load_slot(row.address, row.bits, end, row.length) if row.wide else nothing(row)
        units = [_load_before(row, place, end, (place == end).select(last, nothing(row))) for place in places]
    return units


def load_rank(row: ScoreRow, index: Any) -> Any:
    """The rank of the score at ``index`` (i32), which the row has."""
    one = ScoreRow(row.address, row.dtype, row.length, False, row.index_bits, row.low)
    (bits,) = f32_bits(one, load_element(row.address + fx.Int64(index) * fx.Int64(row.bits.width // 8), row.bits))
    return rank_of(ordered_key(bits), index, row.index_bits, row.low)


def fold_ranks(ranks: Sequence[Any]) -> Fold:
    """The fold over ranks in registers."""
    return lambda step, state: reduce(lambda so_far, rank: step(rank, so_far), ranks, state)


def fold_row(row: ScoreRow, threads: int, units: int, begin: Any = 0) -> Fold:
    """The fold over the row from unit ``begin`` on, read anew by the block each time, ``units`` loads in flight."""

    @flyc.jit
    def fold(step: Any, state: Any) -> Any:
        first = fx.Int32(fx.thread_idx.x) + fx.Int32(begin)
        while first * fx.Int32(row.per_unit) < row.length:
            places = [first + fx.Int32(j * threads) for j in range(units)]
            state = fold_ranks(ranks_of(row, load_units(row, places), places))(step, state)
            first = first + fx.Int32(threads * units)
        return state

    return fold
