# SPDX-License-Identifier: Apache-2.0
"""Reductions whose bits do not depend on who computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flydsl.expr as fx

from flycomm.primitives._override import overridable
from flycomm.primitives.decode import widen


def sum_in_rank_order(terms: Sequence[Any]) -> Any:
    """``((+0.0 + terms[0]) + terms[1]) + …`` in f32, ``terms[s]`` being rank ``s``'s vector of any float type.

    Returns an f32 vector. Every rank that is given the same terms gets the same bits (NaN payloads aside), whatever
    the protocol, the batch or the number of blocks. No multiply: nothing here can be contracted.
    """
    total = fx.Vector.filled(terms[0].numel, 0.0, fx.Float32)
    for term in terms:
        total = total + term.to(fx.Float32)
    return total


def reduce_in_rank_order(terms: Sequence[Any], reduction: str = "sum") -> Any:
    """``terms[s]``, rank ``s``'s vector of any float type, reduced in f32 by one of ``dtypes.REDUCTIONS``.

    "avg" is the sum of :func:`sum_in_rank_order` divided by the number of ranks, rounded as f32 once more. "max" and
    "min" are IEEE 754's maximum and minimum: a NaN of any rank stays NaN, and -0 is less than +0.
    """
    if reduction in ("sum", "avg"):
        total = sum_in_rank_order(terms)
        return total if reduction == "sum" else total / fx.Vector.filled(total.numel, float(len(terms)), fx.Float32)
    better = fx.arith.maximumf if reduction == "max" else fx.arith.minimumf
    best = terms[0].to(fx.Float32)
    for term in terms[1:]:
        best = fx.Vector(better(best, term.to(fx.Float32)))
    return best


@overridable
def rounded_sum(terms: Sequence[Any]) -> Any:
    """:func:`sum_in_rank_order` of ``terms``, vectors of one float type, rounded to that type."""
    return sum_in_rank_order([widen(term) for term in terms]).to(terms[0].dtype)


def nan_unless(ok: Any, total: Any) -> Any:
    """``total`` (an f32 vector), or NaN in every element: what failed must not look like a result."""
    return ok.select(total, fx.Vector.filled(total.numel, float("nan"), fx.Float32))
