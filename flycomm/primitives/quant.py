# SPDX-License-Identifier: Apache-2.0
"""f32 to 8-bit floats (e4m3), with a scale: static, of a row, or of a group of elements.

By integer arithmetic that every target compiles to the same bits: round to nearest, ties to even; what is larger than
the largest finite value, infinity too, becomes that value; every NaN becomes the format's one. So it is torch's
``x.clamp(-largest, largest).to(dtype)``, except for the sign that a NaN may keep there. OCP "8-bit Floating Point
Specification", 2023, for e4m3fn; e4m3fnuz (gfx942) has another bias, no -0 and one NaN, 0x80.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx

from flycomm.primitives.access import pointer
from flycomm.primitives.norm import fold, fold_block, fold_lanes

GROUP = 128  # elements that share a scale, where groups do

_SIGN = 0x80000000
_INFINITY = 0x7F800000


@dataclass(frozen=True)
class Fp8:
    """A format of 4 exponent and 3 mantissa bits. ``torch_name`` is an attribute of torch."""

    torch_name: str
    largest: float  # finite
    bias: int
    nan: int  # its bits
    signed_zero: bool


E4M3FN = Fp8("float8_e4m3fn", 448.0, 7, 0x7F, True)
E4M3FNUZ = Fp8("float8_e4m3fnuz", 240.0, 8, 0x80, False)


def native(arch: str) -> Fp8:
    """The format that the matrix units of ``arch`` ("gfx942", "sm_90", …) take."""
    return E4M3FNUZ if arch.startswith("gfx94") else E4M3FN


def _word(numel: int, value: int) -> Any:
    return fx.Vector.filled(numel, fx.Uint32(value), fx.Uint32)


def encode(values: Any, fmt: Fp8) -> Any:
    """The bits of an f32 vector's elements in ``fmt``, as a u32 vector of values below 256."""
    n = values.numel
    words = values.bitcast(fx.Uint32)
    size = words & _word(n, 0x7FFFFFFF)
    (bound,) = struct.unpack("<I", struct.pack("<f", fmt.largest))
    largest = _word(n, bound)
    finite = (size > largest).select(largest, size)
    # add half a unit of the last kept bit, less one if that bit is even, and cut
    odd = (finite >> _word(n, 20)) & _word(n, 1)
    normal = (finite + odd + _word(n, 0x7FFFF) - _word(n, (127 - fmt.bias) << 23)) >> _word(n, 20)
    # below the least normal value the unit is fixed: let the adder of f32 round to it
    anchor = fx.Vector.filled(n, 2.0 ** (21 - fmt.bias), fx.Float32)
    small = (finite.bitcast(fx.Float32) + anchor).bitcast(fx.Uint32) - anchor.bitcast(fx.Uint32)
    bits = (finite < _word(n, (128 - fmt.bias) << 23)).select(small, normal)
    sign = (words & _word(n, _SIGN)) >> _word(n, 24)
    if not fmt.signed_zero:
        sign = (bits == _word(n, 0)).select(_word(n, 0), sign)
    return (size > _word(n, _INFINITY)).select(_word(n, fmt.nan), bits | sign)


def store(address: Any, codes: Any) -> None:
    """Store a vector of 4 or 8 codes of :func:`encode` as so many bytes, to an address with that alignment. Plain."""
    words = []
    for first in range(0, codes.numel, 4):
        word = codes[first]
        for e in range(1, 4):
            word = word | (codes[first + e] << fx.Uint32(8 * e))
        words.append(word)
    fx.generic_store(pointer(address, fx.Uint32, codes.numel), fx.Vector.from_elements(words, fx.Uint32))


def _larger(left: Any, right: Any) -> Any:
    return (left > right).select(left, right)


def _sizes(fragment: Any) -> Any:
    """The largest magnitude of a fragment, as the bits of an f32: as integers they order alike, and NaN is largest."""
    words = fragment.bitcast(fx.Uint32) & _word(fragment.numel, 0x7FFFFFFF)
    return fold([words[e] for e in range(fragment.numel)], _larger)


def amax_of_row(row: Sequence[Any], slots: Any, turn: Any, threads: int) -> Any:
    """The largest magnitude (f32) of a row, NaN if it has one, the same in every thread of the block.

    ``row`` is this thread's fragments as f32 vectors; :func:`flycomm.primitives.norm.fold_block` has the contract, with
    ``slots`` for f32.
    """
    mine = fold([_sizes(fragment) for fragment in row], _larger)
    return fold_block(mine.bitcast(fx.Float32), _larger_size, slots, turn, threads)


def _larger_size(left: Any, right: Any) -> Any:
    return _larger(left.bitcast(fx.Uint32), right.bitcast(fx.Uint32)).bitcast(fx.Float32)


def amax_of_group(fragment: Any) -> Any:
    """The largest magnitude (f32) of the group of :data:`GROUP` elements that ``fragment``, an f32 vector, is part of.

    A group is one fragment each of neighbouring lanes, the first of which is a multiple of their number. Every lane of
    the warp calls it. NaN if the group has one.
    """
    return fold_lanes(_sizes(fragment), GROUP // fragment.numel, _larger).bitcast(fx.Float32)


def scale_of(amax: Any, fmt: Fp8, floor: float) -> Any:
    """``max(amax / largest, floor)`` (f32): what to divide by so that all fits; at least ``floor``, so never zero."""
    scale = amax / fx.Float32(fmt.largest)
    return (scale < fx.Float32(floor)).select(fx.Float32(floor), scale)


def quantize(fragment: Any, scale: Any, fmt: Fp8) -> Any:
    """:func:`encode` of ``fragment * (1 / scale)``, both roundings those of f32. ``scale`` is f32."""
    return encode(fragment * fx.Vector.filled(fragment.numel, fx.Float32(1.0) / scale, fx.Float32), fmt)
