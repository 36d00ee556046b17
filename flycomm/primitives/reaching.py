# SPDX-License-Identifier: Apache-2.0
"""Which scores may reach a rank, in two or three instructions a score: the bits of floats are compared as they are."""

from collections.abc import Sequence
from typing import Any

import flydsl.expr as fx

from flycomm.primitives.rank import element_of
from flycomm.primitives.score_row import ScoreRow, f32_bits


def _window(key: Any) -> tuple[Any, Any]:
    """``(shift, width)`` (u32) such that an f32 of a key not below ``key`` has ``bits + shift <= width``.

    Only NaNs of positive sign may have it besides, and only for keys up to that of 0.
    """
    positive = key > fx.Uint32(0x80000000)
    highest = fx.Uint32(0xFF800000)  # key of +inf; above it there is nothing but a NaN
    below = (key > fx.Uint32(0x7FFFFFFF)).select(fx.Uint32(0x7FFFFFFF), key)
    width = (below > fx.Uint32(0x007FFFFF)).select(below ^ fx.Uint32(0xFFFFFFFF), fx.Uint32(0xFFFFFFFF))
    return (
        positive.select(fx.Uint32(0x80000000) - key, fx.Uint32(0)),
        positive.select((key > highest).select(fx.Uint32(0), highest - key), width),
    )


def reaching(row: ScoreRow, units: Sequence[Any], places: Sequence[Any], floor: Any) -> Any:
    """Bit ``i`` (of a u32) is set if score ``i`` of the ``units`` at ``places`` may have a rank not below ``floor``.

    It is set for all that have, and for no column beyond the row. There are two limits, chosen by the place of a unit,
    since of equal keys only those on one side of an index reach the rank. At most 32 scores.
    """
    key, index = element_of(floor, row.index_bits, row.low)
    equal, above = _window(key), _window(key + fx.Uint32(1))
    reached = fx.Uint32(0)
    for j, (unit, place) in enumerate(zip(units, places, strict=True)):
        first = place * fx.Int32(row.per_unit)
        with_equal = (first <= index) if row.low else (first + fx.Int32(row.per_unit - 1) >= index)
        shift, width = (with_equal.select(one, other) for one, other in zip(equal, above, strict=True))
        unit_reached = fx.Uint32(0)
        for e, bits in enumerate(f32_bits(row, unit)):
            unit_reached = unit_reached | (bits + shift <= width).select(fx.Uint32(1 << e), fx.Uint32(0))
        there = row.length - first  # how many of the unit the row has; more than all of it is enough
        few = (there < fx.Int32(row.per_unit)).select(there, fx.Int32(row.per_unit))
        few = (few > fx.Int32(0)).select(few, fx.Int32(0))
        unit_reached = unit_reached & ((fx.Uint32(1) << fx.Uint32(few)) - fx.Uint32(1))
        reached = reached | (unit_reached << fx.Uint32(j * row.per_unit))
    return reached
