# SPDX-License-Identifier: Apache-2.0
"""Scores as integers in a total order, and back.

A score becomes a u32 *key* that compares as the score does; a key and an index become a u64 *rank*, different for every
element, so there are no ties: who selects by rank selects exactly k elements, and the same ones in whatever order they
are looked at. 0 is nobody's key and nobody's rank.
"""

from typing import Any

import flydsl.expr as fx

_NAN, _INFINITY, _SIGN = 0xFF800000, 0x7F800000, 0x80000000  # what a NaN is taken for: -inf


def ordered_key(bits: Any) -> Any:
    """The key (u32, not 0) of an f32 of these bits (u32). -0 counts as +0, every NaN as -inf."""
    nan = (bits & fx.Uint32(0x7FFFFFFF)) > fx.Uint32(_INFINITY)
    bits = nan.select(fx.Uint32(_NAN), bits)
    bits = (bits == fx.Uint32(_SIGN)).select(fx.Uint32(0), bits)
    return bits ^ (bits >= fx.Uint32(_SIGN)).select(fx.Uint32(0xFFFFFFFF), fx.Uint32(_SIGN))


def score_of(key: Any) -> Any:
    """The f32 of which ``key`` is the key: never NaN, never -0."""
    bits = key ^ (key >= fx.Uint32(_SIGN)).select(fx.Uint32(_SIGN), fx.Uint32(0xFFFFFFFF))
    return bits.bitcast(fx.Float32)


def rank_of(key: Any, index: Any, index_bits: int, low: bool) -> Any:
    """The rank (u64) of element ``index`` (i32, below ``2**index_bits``): by key, then the lower or higher index."""
    tie = fx.Uint32(index)
    if low:
        tie = tie ^ fx.Uint32((1 << index_bits) - 1)
    return (fx.Uint64(key) << fx.Uint64(index_bits)) | fx.Uint64(tie)


def element_of(rank: Any, index_bits: int, low: bool) -> tuple[Any, Any]:
    """The key (u32) and the index (i32) of a rank."""
    tie = fx.Uint32(rank) & fx.Uint32((1 << index_bits) - 1)
    if low:
        tie = tie ^ fx.Uint32((1 << index_bits) - 1)
    return fx.Uint32(rank >> fx.Uint64(index_bits)), fx.Int32(tie)
