# SPDX-License-Identifier: Apache-2.0
"""Two bf16 added in f32 and rounded give the bits of their exact sum rounded once: what NVIDIA's pairs rest on."""

from __future__ import annotations

import numpy as np
import pytest

FURTHEST = 40  # exponents apart: f64 holds the sum exactly


def _rounded(bits: np.ndarray, dropped: int) -> np.ndarray:
    """The bits of floats with their last ``dropped`` ones rounded away, to nearest even."""
    one = bits.dtype.type(1)
    half = (one << bits.dtype.type(dropped - 1)) - one
    kept = bits >> bits.dtype.type(dropped)
    return (bits + half + (kept & one)) >> bits.dtype.type(dropped) << bits.dtype.type(dropped)


@pytest.mark.parametrize("apart", range(FURTHEST + 1))
def test_two_roundings_are_one(apart):
    significands = np.arange(128, 256, dtype=np.float64)
    left, right = significands[:, None, None], significands[None, :, None] * np.array([1.0, -1.0]) * 2.0**-apart
    exact = (left + right).ravel()
    by_f32 = (left.astype(np.float32) + right.astype(np.float32)).ravel()
    once = _rounded(exact.view(np.uint64), 52 - 7).view(np.float64)
    twice = _rounded(by_f32.view(np.uint32), 23 - 7).view(np.float32)
    assert (once == twice).all()
