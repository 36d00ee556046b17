# SPDX-License-Identifier: Apache-2.0
"""What the command was asked for, what that comes to, and how many measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flycomm.bench.problem import Case
from flycomm.bench.ranks import Started
from flycomm.errors import UsageError
from flycomm.residency import Residency
from flycomm.tables import OPS, Table
from flycomm.targets import Capabilities, Target
from flycomm.tune import checks
from flycomm.tune.candidates import LIKELY, Candidate, Grids, Stage
from flycomm.tune.crossings import Indexing, Mono
from flycomm.tune.messages import Messages
from flycomm.tune.norms import Norms
from flycomm.tune.results import Planned, Section
from flycomm.tune.search import Measured, Subject
from flycomm.world import World

_CROSSINGS = {one.op: one for one in (Mono, Indexing)}


@dataclass(frozen=True)
class Settings:
    target: Target
    ops: tuple[str, ...]
    sizes: tuple[int, ...]  # of collectives: bytes of a rank's share, ascending powers of two
    cases: Mapping[str, tuple[Case, ...]]  # of the other operations
    modes: tuple[str, ...]  # "graph" before "eager"
    quick: bool
    limit_s: float
    samples: tuple[int, int]  # most calls of a sample, and repeats
    timeout: float | None
    out: Path | None  # None: where rank 0 looks first
    dry: bool  # measure nothing
    how: Callable[[Started], tuple[str, str]]  # what is measured, and by which command

    @property
    def with_group(self) -> bool:
        """Whether something is set beside the group's own backend."""
        return Mono.op in self.ops


class Tunable(Subject, Protocol):
    """An operation that has rows in a table."""

    sizes: Sequence[Any]

    def known(self, captured: bool) -> Stage:
        """What the others are compared with."""

    def stages(self) -> tuple[Stage, ...]:
        """What is worth measuring, stage by stage."""

    def found(self, times: Measured, graph: Any) -> Any:
        """The choices of a mode; ``graph``: those of captured calls, where they were made before."""

    def section(self, mode: str, times: Measured, found: Any) -> Section: ...

    def notes(self, mode: str, found: Any) -> list[str]: ...

    def missing(self, found: Any) -> int:
        """Sizes of which nothing is known."""


@dataclass(frozen=True)
class Work:
    """What is to be measured: of ``rows`` in every mode, of ``crossings`` in the first."""

    rows: Sequence[Tunable]
    crossings: Sequence[Mono | Indexing]
    modes: Sequence[str]

    @classmethod
    def of(cls, base: Table, world: int, found: Capabilities, sharing: int, settings: Settings) -> Work:
        """On ``world`` ranks, of which a device has ``sharing`` at most. ``base``: the table before."""
        fits = Residency.of(found, sharing, 1, 0).fits if found.graphs else lambda grid: True
        grids = Grids.of(found.compute_units, found.graphs, settings.quick)
        rows: list[Tunable] = []
        crossings: list[Mono | Indexing] = []
        for op in settings.ops:
            if op in OPS:
                rows.append(Messages(op, settings.sizes, world, base, grids, fits))
            elif op in _CROSSINGS:
                mode, target = settings.modes[0], settings.target.name
                crossings.append(_CROSSINGS[op](settings.cases[op], mode, world, target, base))
            else:
                rows.append(Norms(settings.cases[op], world, base, grids, fits, base))
        return cls(rows, crossings, settings.modes)

    def check(self, world: World, found: Capabilities, sharing: int) -> None:
        """What can be refused before anything is measured. Collective."""
        messages = [one for one in self.rows if isinstance(one, Messages)]
        if messages:
            checks.check_memory(world, found, sharing, [one.op for one in messages], messages[0].sizes[-1])
        for crossing in self.crossings:
            if world.size == 1 and isinstance(crossing, Indexing):
                raise UsageError("--ops indexer measures what ranks win by sharing, and this is 1 rank; use 2 at least")
            checks.check_data(world, found, sharing, crossing.op, crossing.device_bytes())

    @property
    def lanes(self) -> list[tuple[Tunable, str]]:
        return [(one, mode) for mode in self.modes for one in self.rows]

    def at_most(self, one: Tunable, mode: str, size: Any) -> int:
        """How many measurements a size takes where all candidates are equally fast."""
        known = one.known(mode == "graph")(size, {})
        again = LIKELY + len(known)
        if mode == "eager" and "graph" in self.modes:
            return len(known) + LIKELY + again
        equal: dict[Candidate, float] = dict.fromkeys(known, 1.0)
        for stage in one.stages():
            equal |= dict.fromkeys(stage(size, equal), 1.0)
        return len(equal) + again

    def planned(self) -> list[Planned]:
        found = [
            Planned(one.op, mode, one.label(size), self.at_most(one, mode, size))
            for one, mode in self.lanes
            for size in one.sizes
        ]
        for each in self.crossings:
            found += [Planned(each.op, each.mode, each.label(case), each.at_most) for case in each.cases]
        return found

    def steps(self) -> list[int]:
        """Measurements at most of each operation and mode, in order."""
        counts = [sum(self.at_most(one, mode, size) for size in one.sizes) for one, mode in self.lanes]
        return counts + [each.at_most * len(each.cases) for each in self.crossings]
