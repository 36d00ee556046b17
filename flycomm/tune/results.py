# SPDX-License-Identifier: Apache-2.0
"""What comes out of the command: a table, and what is printed of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flycomm.tables import Table

_NOTHING = "–"


@dataclass(frozen=True)
class Section:
    """Of one operation and mode, a line a size."""

    op: str
    mode: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Planned:
    """How many measurements a size takes at most."""

    op: str
    mode: str
    size: str
    count: int


@dataclass(frozen=True)
class Tuned:
    path: Path
    table: Table
    sections: Sequence[Section]
    notes: Sequence[str]
    planned: Sequence[Planned]  # of a dry run
    wrong: bool


def compared(us: float, other_us: float | None) -> list[str]:
    """Cells: a time, another (None: it was not measured), and by how much the first is faster."""
    if other_us is None:
        return [f"{us:.2f}", _NOTHING, _NOTHING]
    return [f"{us:.2f}", f"{other_us:.2f}", f"{other_us / us - 1:.0%}"]
