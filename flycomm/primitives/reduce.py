# SPDX-License-Identifier: Apache-2.0
"""Sums whose bits do not depend on who computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flydsl.expr as fx


def sum_in_rank_order(terms: Sequence[Any]) -> Any:
    """``((+0.0 + terms[0]) + terms[1]) + …`` in f32, ``terms[s]`` being rank ``s``'s vector of any float type.

    Returns an f32 vector. Every rank that is given the same terms gets the same bits (NaN payloads aside), whatever
    the protocol, the batch or the number of blocks. No multiply: nothing here can be contracted.
    """
    total = fx.Vector.filled(terms[0].numel, 0.0, fx.Float32)
    for term in terms:
        total = total + term.to(fx.Float32)
    return total


def nan_unless(ok: Any, total: Any) -> Any:
    """``total`` (an f32 vector), or NaN in every element: what failed must not look like a result."""
    return ok.select(total, fx.Vector.filled(total.numel, float("nan"), fx.Float32))
