# SPDX-License-Identifier: Apache-2.0
"""From samples to the two numbers of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Timing:
    us: float  # of the slowest rank
    skew_us: float  # slowest rank minus fastest


def slowest(samples: Sequence[Sequence[float]]) -> Timing:
    """``samples[rank]`` are one rank's microseconds a call, one number a repeat: the median of each rank, then the
    rank that is slowest by it."""
    medians = [median(rank) for rank in samples]
    return Timing(max(medians), max(medians) - min(medians))
