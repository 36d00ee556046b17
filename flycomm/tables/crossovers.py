# SPDX-License-Identifier: Apache-2.0
"""From which context on ranks share the scoring of an indexer: a section of the dispatch tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flycomm.channel import MAX_WORLD

_SOURCES = ("measured", "modelled")


@dataclass(frozen=True)
class Crossover:
    """Steps of up to ``rows`` query rows (None: all with more) share the scoring from ``context`` tokens on.

    ``context`` None: they never do. ``kind``: of indexer. ``source``: "measured" or "modelled", of this line alone.
    """

    kind: str
    worlds: tuple[int, int]  # first and last number of ranks
    rows: int | None
    context: int | None
    source: str


def parse(data: dict[str, Any]) -> Crossover:
    """One line of a table's file; raises TypeError, ValueError or KeyError where it is none."""
    first, last = data["worlds"]
    one = Crossover(**{**data, "worlds": (first, last)})
    numbers = (first, last, one.rows or 0, one.context or 0)
    if wrong := [number for number in numbers if type(number) is not int]:
        raise TypeError(f"{wrong[0]!r} is not a whole number")
    if not isinstance(one.kind, str):
        raise TypeError(f"kind {one.kind!r} is not a name")
    return one


def problems(every: Sequence[Crossover]) -> Iterable[str]:
    """What is wrong in a table's section, in sentences."""
    for one in every:
        if not 1 <= one.worlds[0] <= one.worlds[1] <= MAX_WORLD:
            yield f"worlds of {one.worlds[0]} to {one.worlds[1]} ranks are not within 1..{MAX_WORLD}"
        elif one.source not in _SOURCES:
            yield f"the source of a crossover, {one.source!r}, is not one of {', '.join(_SOURCES)}"
        elif (one.context is not None and one.context < 0) or (one.rows is not None and one.rows < 1):
            yield f"a crossover at {one.context} tokens for {one.rows} rows is not one of at least 0 and 1"
    for kind, worlds in dict.fromkeys((one.kind, one.worlds) for one in every):
        rows = [one.rows for one in every if (one.kind, one.worlds) == (kind, worlds)]
        bounds = [bound for bound in rows if bound is not None]
        if bounds != sorted(set(bounds)) or None in rows[:-1]:
            yield f"rows of {kind} with {worlds} ranks are {rows}, not ascending with null at the end"
