# SPDX-License-Identifier: Apache-2.0
"""From samples to the numbers of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles


@dataclass(frozen=True)
class Timing:
    us: float  # of the slowest rank
    skew_us: float  # slowest rank minus fastest
    spread_us: float | None  # the middle half of the slowest rank's samples is this wide; None for a single sample


def slowest(samples: Sequence[Sequence[float]]) -> Timing:
    """``samples[rank]`` are one rank's microseconds a call, one number a repeat: the median of each rank, then the
    rank that is slowest by it."""
    medians = [median(rank) for rank in samples]
    us = max(medians)
    return Timing(us, us - min(medians), _spread(samples[medians.index(us)]))


def _spread(samples: Sequence[float]) -> float | None:
    if len(samples) < 2:
        return None
    lower, _, upper = quantiles(samples, n=4, method="inclusive")
    return upper - lower
