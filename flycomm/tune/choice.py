# SPDX-License-Identifier: Apache-2.0
"""From times to one choice a size, and from choices to rows.

A choice changes from one size to the next only where that wins more than the noise: every grid and protocol of a table
has channels of its own in every communicator. Of candidates within the noise the one with the fewest threads is taken:
what does not communicate needs the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flycomm.geometry import size_class
from flycomm.tables import Row
from flycomm.tune.candidates import Candidate, Times

NOISE = 0.02  # of the best time


@dataclass(frozen=True)
class Choice:
    num_bytes: int
    candidate: Candidate
    us: float


def choose(times: Mapping[int, Times], preferred: Mapping[int, Candidate] | None = None) -> list[Choice]:
    """One choice for every size that has times, the smallest first.

    Within the noise, in this order: ``preferred`` for the size (what the other mode took, with which one table serves
    both), what carries on the size before, the fewest threads.
    """
    choices: list[Choice] = []
    for num_bytes in sorted(size for size, measured in times.items() if measured):
        measured = times[num_bytes]
        equal = _equal(measured)
        alike = [one for one in equal if (preferred or {}).get(num_bytes) == one]
        if not alike and choices:
            before = choices[-1]
            alike = [one for one in equal if _carries_on(before.candidate, one, before.num_bytes)]
        taken = min(alike, key=lambda one: (measured[one], one)) if alike else equal[0]
        choices.append(Choice(num_bytes, taken, measured[taken]))
    return choices


def choose_from_the_longest(
    times: Mapping[int, Times], preferred: Mapping[int, Candidate] | None = None
) -> list[Choice]:
    """As :func:`choose`, for rows of which each may take all that is shorter: a choice goes on from the size after it,
    so that few rows do. Capacities don't count: that of a row is the largest of its choices'."""
    choices: list[Choice] = []
    for num_bytes in sorted((size for size, measured in times.items() if measured), reverse=True):
        measured = times[num_bytes]
        equal = _equal(measured)
        models = [(preferred or {}).get(num_bytes), choices[-1].candidate if choices else None]
        alike = [one for model in models if model is not None for one in equal if _same_grid(model, one)]
        taken = (alike or equal)[0]
        choices.append(Choice(num_bytes, taken, measured[taken]))
    return choices[::-1]


def rows_of(op: str, worlds: tuple[int, int], choices: Iterable[Choice]) -> list[Row]:
    """Each size takes what is longer than the size before; neighbours that are alike are one row."""
    return collapsed([choice.candidate.row(op, worlds, choice.num_bytes) for choice in choices])


def collapsed(rows: Sequence[Row]) -> list[Row]:
    """Rows without those that the row after would serve in the same way."""
    kept: list[Row] = []
    for row in rows:
        if (
            kept
            and replace(kept[-1], largest=row.largest, capacity=row.capacity) == row
            and _same_pieces(kept[-1], row)
        ):
            kept.pop()
        kept.append(row)
    return kept


def _equal(measured: Times) -> list[Candidate]:
    """What is as fast as the best, within the noise; the fewest threads first."""
    limit = min(measured.values()) * (1 + NOISE)
    return sorted(
        (one for one, us in measured.items() if us <= limit),
        key=lambda one: (one.blocks * one.threads, measured[one], one),
    )


def _same_grid(one: Candidate, other: Candidate) -> bool:
    return (one.protocol, one.geometry) == (other.protocol, other.geometry)


def _carries_on(earlier: Candidate, later: Candidate, num_bytes: int) -> bool:
    """Whether ``later`` does messages of up to ``num_bytes`` as ``earlier`` does."""
    return _same_grid(earlier, later) and _piece(earlier.capacity, num_bytes) == _piece(later.capacity, num_bytes)


def _same_pieces(earlier: Row, later: Row) -> bool:
    assert earlier.largest is not None
    return _piece(earlier.capacity, earlier.largest) == _piece(later.capacity, earlier.largest)


def _piece(capacity: int, num_bytes: int) -> int:
    return min(capacity, size_class(num_bytes))
