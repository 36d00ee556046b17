# SPDX-License-Identifier: Apache-2.0
"""Inputs from a seed, so that every rank can make every rank's; what they reduce to; and whether a result is it.

All on the CPU: what a kernel is compared with comes from no GPU code.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flycomm.dtypes import REDUCIBLE

DTYPES: dict[str, torch.dtype] = {entry.name: getattr(torch, entry.torch_name) for entry in REDUCIBLE.values()}
_SEED = 20_210


def make_input(rank: int, buffer: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """What ``rank`` contributes in buffer number ``buffer``: ``count`` normally distributed elements."""
    generator = torch.Generator().manual_seed(_SEED + 1009 * buffer + rank)
    return torch.randn(count, generator=generator, dtype=torch.float32).to(dtype)


def reduce_in_rank_order(terms: Sequence[torch.Tensor], reduction: str = "sum") -> torch.Tensor:
    """``((+0.0 + terms[0]) + terms[1]) + …`` in f32, rounded once to the terms' dtype.

    "avg" divides that sum by the number of terms, in f32, before it is rounded; "max" and "min" round nothing.
    """
    if reduction in ("max", "min"):
        better = torch.maximum if reduction == "max" else torch.minimum
        return functools.reduce(better, terms)
    total = torch.zeros(terms[0].shape, dtype=torch.float32)
    for term in terms:
        total += term.float()
    return (total / len(terms) if reduction == "avg" else total).to(terms[0].dtype)


def error_bound(terms: Sequence[torch.Tensor], reduction: str = "sum") -> torch.Tensor:
    """How far (f32, elementwise) a result may be from :func:`reduce_in_rank_order`, made in any order and with every
    intermediate rounded to the terms' dtype: for a sum one rounding a term, of at most the sum of magnitudes, on either
    side; for an average a division more, and its share of that; for the others nothing."""
    magnitudes = torch.zeros(terms[0].shape, dtype=torch.float32)
    if reduction in ("max", "min"):
        return magnitudes
    for term in terms:
        magnitudes += term.float().abs()
    roundings, parts = (len(terms) + 2, len(terms)) if reduction == "avg" else (len(terms) + 1, 1)
    return magnitudes / parts * (torch.finfo(terms[0].dtype).eps * roundings)


@dataclass(frozen=True)
class Verdict:
    correct: bool
    max_error: float  # largest absolute difference from what was expected; infinite where a result is NaN


def judge(result: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor | None) -> Verdict:
    """Compare CPU tensors: to the bit, or within ``bound`` where one is given."""
    difference = (result.float() - expected.float()).abs()
    max_error = float(difference.max()) if difference.numel() else 0.0
    if bound is not None:
        correct = bool((difference <= bound).all())
    else:
        words = torch.int32 if result.element_size() == 4 else torch.int16
        correct = torch.equal(result.contiguous().view(words), expected.contiguous().view(words))
    return Verdict(correct, max_error if math.isfinite(max_error) else math.inf)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """All of them correct, and the largest error among them."""
    return Verdict(all(one.correct for one in verdicts), max((one.max_error for one in verdicts), default=0.0))
