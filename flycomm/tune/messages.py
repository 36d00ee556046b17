# SPDX-License-Identifier: Apache-2.0
"""The collectives as :mod:`~flycomm.tune.search` measures them: sizes are bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from flycomm.bench.collective import SHARE
from flycomm.bench.contender import Context
from flycomm.bench.ours import Flycomm
from flycomm.bench.units import format_bytes
from flycomm.geometry import Geometry
from flycomm.tables import LOOPING, Row, Table
from flycomm.tune.candidates import Candidate, Grids, Stage, Times, stages
from flycomm.tune.choice import Choice, choose
from flycomm.tune.results import Section, compared
from flycomm.tune.search import EVERY_WORLD, Measured, fillers
from flycomm.tune.tiles import Tiled, Tiles


@dataclass
class Messages:
    """One collective on ``world`` ranks. ``base``: the table before. ``tiles``: what messages are made of; a plan needs
    none."""

    op: str
    sizes: Sequence[int]
    world: int
    base: Table
    grids: Grids
    fits: Callable[[Geometry], bool]
    tiles: Tiles | None = None

    def num_bytes(self, size: int) -> int:
        return size

    def label(self, size: int) -> str:
        return format_bytes(size)

    def together(self, column: Mapping[int, Candidate], size: int, candidate: Candidate) -> bool:
        return True

    def table(self, arch: str, column: Mapping[int, Candidate]) -> Table:
        return candidate_table(arch, self.op, column)

    def problem(self, context: Context, size: int) -> Tiled:
        assert self.tiles is not None
        return Tiled(context, self.tiles, size)

    def contender(self) -> Flycomm:
        return Flycomm()

    def planned(self, context: Context, size: int, captured: bool) -> Candidate:
        assert self.tiles is not None
        row = Flycomm.plan(context, Tiled.case_of(size), captured).row
        assert row is not None
        return Candidate.in_force(row, size)

    def known(self, captured: bool) -> Stage:
        """What the table before has for a size: what is chosen should not be slower."""

        def stage(size: int, times: Times) -> list[Candidate]:
            one = self._before(size, captured)
            return [one] if self.fits(one.geometry) else []

        return stage

    def stages(self) -> tuple[Stage, ...]:
        return stages(self.op, self.world, self.grids, self.fits)

    def found(self, times: Measured, graph: Sequence[Choice] | None) -> list[Choice]:
        """The choices; ``graph``: those of captured calls, where they have been measured."""
        return choose(times, {one.num_bytes: one.candidate for one in graph or ()})

    def section(self, mode: str, times: Measured, found: Sequence[Choice]) -> Section:
        columns = [SHARE[self.op], "protocol", "grid", "piece", "µs", "before", "gain"]
        rows = []
        for choice in found:
            one, size = choice.candidate, choice.num_bytes
            grid, whole = f"{one.blocks} × {one.threads}", piece(one.protocol, one.capacity, size)
            before = times[size].get(self._before(size, mode == "graph"))
            rows.append([self.label(size), one.protocol, grid, whole, *compared(choice.us, before)])
        return Section(self.op, mode, columns, rows)

    def notes(self, mode: str, found: Sequence[Choice]) -> list[str]:
        return []

    def missing(self, found: Sequence[Choice]) -> int:
        return len(self.sizes) - len(found)

    def _before(self, size: int, captured: bool) -> Candidate:
        rows = self.base.of(self.op, self.world, captured)
        row = next(row for row in rows if row.largest is None or size <= row.largest)
        return Candidate.in_force(row, size)


def candidate_table(arch: str, op: str, column: Mapping[int, Candidate]) -> Table:
    """A table in which messages of each size go as the candidate says."""
    rows: list[Row] = [candidate.row(op, EVERY_WORLD, size) for size, candidate in sorted(column.items())]
    rows[-1] = replace(rows[-1], largest=None)
    return Table(arch, "measured", "candidates of tune", (*rows, *fillers(op)))


def piece(protocol: str, capacity: int, size: int | None) -> str:
    """What goes at a time, where that is not the whole message."""
    return format_bytes(capacity) if protocol in LOOPING and (size is None or capacity < size) else "whole"
