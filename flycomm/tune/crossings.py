# SPDX-License-Identifier: Apache-2.0
"""What a Runner and an indexer choose by: bench's subject beside what it would be instead, case by case.

A mono launch is set beside the faster of separate kernels with flycomm's reduction and with the group's own backend;
ranks that share an indexer's scoring beside ranks that each do all of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from flycomm.bench import baselines, labels
from flycomm.bench.contender import Context
from flycomm.bench.harness import BaselineError, Method, measure, measure_best
from flycomm.bench.problem import BUFFERS, Case
from flycomm.bench.subjects import SUBJECTS, mono
from flycomm.bench.subjects.index_cache import Shape
from flycomm.tables import Pays, Table
from flycomm.tables.crossovers import Crossover
from flycomm.tune.crossover import Pair, rows_up_to, shared_from
from flycomm.tune.merge import crossovers_of
from flycomm.tune.results import Section, compared
from flycomm.tune.search import Search, budget

_SEPARATE = {"host": "separate_gloo", "cuda": "separate_nccl", "rocm": "separate_rccl"}


class Duel(NamedTuple):
    """µs a call, and what the other one is."""

    us: float
    other_us: float
    other: str


@dataclass
class Crossing:
    """An operation of which ``cases`` are measured in ``mode`` on ``world`` ranks of a target."""

    cases: Sequence[Case]
    mode: str
    world: int
    target: str
    base: Table
    duels: dict[Case, Duel] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    op: ClassVar[str]
    ours: ClassVar[str]  # a heading

    @property
    def against(self) -> tuple[str, ...]:
        raise NotImplementedError

    @property
    def at_most(self) -> int:
        """Measurements of a case."""
        return 1 + len(self.against)

    def label(self, case: Case) -> str:
        return labels.size(case.fields())

    def device_bytes(self) -> int:
        """Of the data of the largest case, on one rank."""
        return max(BUFFERS * self.case_bytes(case) for case in self.cases)

    def case_bytes(self, case: Case) -> int:
        raise NotImplementedError

    def run(self, search: Search, in_force: Table) -> None:
        """Collective: the times of every case, as far as time allows. ``in_force``: by which flycomm's own calls go."""
        search.clock.begin()
        capabilities = search.target.capabilities(search.world.device)
        needed = budget(in_force, search.world.size, capabilities.graphs)
        with search.context(self.op, in_force, max(needed, *(case.num_bytes for case in self.cases))) as context:
            names, reasons = baselines.usable(context, self.against)
            self.notes += [f"{self.op} was not set beside {name}: {reason}" for name, reason in reasons.items()]
            for case in self.cases:
                if not search.in_time():
                    break
                self._duel(search, context, case, names)
        search.world.agree(hashlib.sha256(repr(self.duels).encode()).digest(), "measured times")

    def _duel(self, search: Search, context: Context, case: Case, names: Sequence[str]) -> None:
        subject, label = SUBJECTS[self.op], f"{self.op}, {self.label(case)}"
        method = Method(self.mode, max(BUFFERS, search.samples[0]), search.samples[1])
        problem = subject.problem(context, case)
        found = measure(context, subject.contender(), problem, method, True)
        search.advance(label)
        if found.us is None:
            search.wrong.append(f"{label}: the result is wrong by up to {found.max_error:g}; left out")
            return
        others: dict[str, float] = {}
        for name in names:
            try:
                others[name] = measure_best(context, baselines.REGISTRY[name], problem, method).us or 0.0
            except BaselineError as error:
                self.notes.append(f"{label}: {name}: {error}")
            search.advance(f"{label}, {name}")
        if others:
            best = min(others, key=lambda name: others[name])
            self.duels[case] = Duel(found.us, others[best], best)

    def section(self) -> Section:
        columns = ["case", self.ours, "instead", "gain", "by"]
        rows = [[self.label(case), *compared(one.us, one.other_us), one.other] for case, one in self.duels.items()]
        return Section(self.op, self.mode, columns, rows)

    @property
    def missing(self) -> int:
        return len(self.cases) - len(self.duels)


class Mono(Crossing):
    """Cases of one shape of layer are a line of the table: projections are no part of it, so their times are added."""

    op = "mono_ffn"
    ours = "one launch"

    @property
    def against(self) -> tuple[str, ...]:
        return "separate_flycomm", _SEPARATE[self.target]

    def case_bytes(self, case: Case) -> int:
        return mono.weight_bytes(case, self.world)

    def lines(self) -> tuple[Pays, ...]:
        shapes = dict.fromkeys((case.hidden or 0, case.intermediate or 0) for case in self.duels)
        return tuple(self._line(*shape) for shape in shapes)

    def _line(self, hidden: int, inter: int) -> Pays:
        of = {case: one for case, one in self.duels.items() if (case.hidden, case.intermediate) == (hidden, inter)}
        before = self.base.pays_up_to(self.op, self.world, hidden, inter)
        rows = rows_up_to(_added((case.rows or 0, one) for case, one in of.items()), before)
        return Pays(self.op, (self.world, self.world), hidden, inter, rows)

    def verdicts(self) -> list[str]:
        return [
            f"{one.kernel}, hidden {one.hidden}, intermediate {one.inter}: one launch up to {one.rows} rows"
            for one in self.lines()
        ]


class Indexing(Crossing):
    """Cases of one kind and number of rows are a line of the table."""

    op = "indexer"
    ours = "shared"

    @property
    def against(self) -> tuple[str, ...]:
        return ("replicated",)

    def case_bytes(self, case: Case) -> int:
        return Shape.of(case).share_bytes(1)

    def lines(self) -> tuple[Crossover, ...]:
        steps = dict.fromkeys((case.kind or "", Shape.of(case).rows) for case in self.duels)
        return tuple(self._line(*step) for step in sorted(steps))

    def _line(self, kind: str, rows: int) -> Crossover:
        of = {case: one for case, one in self.duels.items() if (case.kind, Shape.of(case).rows) == (kind, rows)}
        known = crossovers_of(self.base.indexer, kind, self.world)
        before = next((one.context for one in known if one.rows is None or rows <= one.rows), 0)
        context = shared_from(_added((case.context or 0, one) for case, one in of.items()), before)
        return Crossover(kind, (self.world, self.world), rows, context, "measured")

    def verdicts(self) -> list[str]:
        said = []
        for one in self.lines():
            longest = max(case.context or 0 for case in self.duels if case.kind == one.kind)
            when = f"from {one.context} tokens on" if one.context is not None else f"never: not up to {longest} tokens"
            said.append(f"indexer {one.kind}, {one.rows} rows: ranks share the scoring {when}")
        return said


def _added(duels: Iterator[tuple[int, Duel]]) -> Mapping[int, Pair]:
    """By size, the two times; of several cases of one size their sums."""
    found: dict[int, Pair] = {}
    for size, one in duels:
        us, other_us = found.get(size, (0.0, 0.0))
        found[size] = us + one.us, other_us + one.other_us
    return found
