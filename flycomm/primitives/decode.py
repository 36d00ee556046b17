# SPDX-License-Identifier: Apache-2.0
"""Narrow floats in a fragment (u32 × 4) to wider ones: bf16 and e4m3 to f32, e2m1 with its scales to bf16.

Integer arithmetic, exact, the same bits on every target. OCP "Microscaling Formats", 2023, for e2m1 (1, 2 and 1 bits,
no infinity or NaN) and ue8m0 (a power of two, 255 is NaN). Orders nothing; takes values in registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import flydsl.expr as fx

if TYPE_CHECKING:
    from flycomm.primitives.quant import Fp8


def _word(value: int) -> Any:
    return fx.Vector.filled(4, fx.Uint32(value), fx.Uint32)


def _elements(vectors: list[Any]) -> list[Any]:
    return [vector[i] for vector in vectors for i in range(4)]


def bf16_values(fragment: Any) -> list[Any]:
    """The 8 elements as f32: those in lower halves first."""
    halves = [fragment << _word(16), fragment & _word(0xFFFF0000)]
    return _elements([half.bitcast(fx.Float32) for half in halves])


def widen(fragment: Any) -> Any:
    """A vector of any float type as f32, in order. bf16 goes by whole words, so what was rounded just before is not
    taken apart to be rounded one by one: NVIDIA GPUs round two elements at a time in a quarter of the time of one."""
    if fragment.dtype is not fx.BFloat16:
        return fragment.to(fx.Float32)
    words = fragment.bitcast(fx.Uint32)
    n = words.numel
    shift, upper = (fx.Vector.filled(n, fx.Uint32(value), fx.Uint32) for value in (16, 0xFFFF0000))
    halves = [half.bitcast(fx.Float32) for half in (words << shift, words & upper)]
    return halves[0].shuffle(halves[1], [half * n + i for i in range(n) for half in range(2)])


def fp8_values(fragment: Any, fmt: Fp8) -> list[Any]:
    """The 16 elements as f32: the lowest byte of every word first."""
    return _elements([_fp8(fragment >> _word(8 * byte), fmt) for byte in range(4)])


def _fp8(codes: Any, fmt: Fp8) -> Any:
    """The lowest byte of each word."""
    size = codes & _word(0x7F)
    least = 128 - fmt.bias  # the exponent, as f32 has it, of the least normal value
    normal = ((size << _word(20)) + _word((127 - fmt.bias) << 23)).bitcast(fx.Float32)
    # below that, the mantissa counts units: put it behind a one, and take the one away
    one = fx.Vector.filled(4, 2.0 ** (least - 127), fx.Float32)
    small = ((size << _word(20)) + _word(least << 23)).bitcast(fx.Float32) - one
    value = (size < _word(8)).select(small.bitcast(fx.Uint32), normal.bitcast(fx.Uint32))
    nan = (codes & _word(0x7F if fmt.signed_zero else 0xFF)) == _word(fmt.nan)
    value = value | ((codes & _word(0x80)) << _word(24))
    return nan.select(_word(0x7FC00000), value).bitcast(fx.Float32)


def ue8m0_value(code: Any) -> Any:
    """The f32 of a scale, a u32 below 256."""
    value = (code == fx.Uint32(0)).select(fx.Uint32(1 << 22), code << fx.Uint32(23))
    return (code == fx.Uint32(255)).select(fx.Uint32(0x7FC00000), value).bitcast(fx.Float32)


def e2m1_fragments(packed: Any, scale: Any) -> list[Any]:
    """32 elements, 8 a word and the lowest 4 bits first, times one ``scale`` (f32): a fragment of bf16 for each word.

    A product that bf16 cannot hold, beyond 2^128 or below 2^-126, is not exact; no such scale is of use.
    """
    factor = fx.Vector.filled(4, scale, fx.Float32)
    halves = [_e2m1(packed >> _word(4 * i), factor) for i in range(8)]
    pairs = [(halves[2 * k] >> _word(16)) | (halves[2 * k + 1] & _word(0xFFFF0000)) for k in range(4)]
    return [fx.Vector.from_elements([pair[word] for pair in pairs], fx.Uint32) for word in range(4)]


def _e2m1(codes: Any, factor: Any) -> Any:
    """The lowest 4 bits of each word, times ``factor``, as bits of f32."""
    size = codes & _word(7)
    normal = (size << _word(22)) + _word(126 << 23)
    small = (size == _word(1)).select(_word(126 << 23), _word(0))
    value = (size < _word(2)).select(small, normal) | ((codes & _word(8)) << _word(28))
    return (value.bitcast(fx.Float32) * factor).bitcast(fx.Uint32)
