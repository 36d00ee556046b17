# SPDX-License-Identifier: Apache-2.0
"""The times of one operation in one mode, on all ranks together: every candidate is checked first, then timed.

Candidates of different sizes are measured in one communicator, whose table is made of them: the n-th of every size, for
n = 0, 1, …; so what has been measured when time is up is something of every size.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import flycomm
from flycomm.bench.collective import Collective
from flycomm.bench.contender import Contender, Context
from flycomm.bench.harness import Method, measure
from flycomm.bench.problem import BUFFERS, Checked
from flycomm.channel import MAX_WORLD
from flycomm.geometry import SMALLEST_CLASS
from flycomm.layout import USER_SHARE, plan_layout
from flycomm.tables import OPS, Row, Table
from flycomm.targets import Target
from flycomm.tune.candidates import LIKELY, Candidate, Stage, fastest
from flycomm.world import World

EVERY_WORLD = (1, MAX_WORLD)
_FILLER = ("flags", 1, 64, SMALLEST_CLASS)  # for operations that are not measured: a table has rows of all
_NO_LIMIT = 1 << 44  # bytes
_BYTES_A_SAMPLE = 32 << 20  # that a rank's calls of one sample move, at least BUFFERS calls

Measured = dict[Any, dict[Candidate, float]]  # size → candidate → µs a call


class Subject(Protocol):
    """An operation of which candidates are measured. A size is a key of its own kind: bytes, or a shape."""

    op: str

    def num_bytes(self, size: Any) -> int:
        """Of a rank's share."""

    def label(self, size: Any) -> str: ...

    def together(self, column: Mapping[Any, Candidate], size: Any, candidate: Candidate) -> bool:
        """Whether one table can send messages of ``size`` as the candidate says beside what is in ``column``."""

    def table(self, arch: str, column: Mapping[Any, Candidate]) -> Table:
        """A table in which messages of each size go as the candidate says."""

    def problem(self, context: Context, size: Any) -> Checked: ...

    def contender(self) -> Contender: ...

    def planned(self, context: Context, size: Any, captured: bool) -> Candidate:
        """What a call of the contender does there."""


@dataclass
class Clock:
    """Until when to measure: what is left is shared out over what is still to come, by the measurements of each."""

    deadline: float  # by time.monotonic()
    steps: list[int]  # measurements of each operation and mode, in order
    until: float = 0.0

    def begin(self) -> None:
        """The next operation and mode."""
        now = time.monotonic()
        self.until = now + (self.deadline - now) * self.steps[0] / sum(self.steps)
        del self.steps[0]


@dataclass
class Search:
    """What one rank has to measure with, and what it has found wrong. All methods are collective."""

    world: World
    group: Any
    target: Target
    stream: Any
    timeout: float | None
    samples: tuple[int, int]  # most calls of a sample, and repeats
    clock: Clock
    folder: Path  # rank 0's, for tables of candidates
    advance: Callable[[str], None]
    wrong: list[str] = field(default_factory=list)
    cut_short: bool = False

    def run(self, subject: Subject, captured: bool, sizes: Sequence[Any], stages: Sequence[Stage]) -> Measured:
        """The times of every candidate that the stages name and that gave the right bits, as far as time allows.

        The first stage names what the others are compared with. It, and what is fastest, is measured again at the end,
        since machines are slower at one time than at another; the lesser time counts.
        """
        self.clock.begin()
        times: Measured = {size: {} for size in sizes}
        seen: dict[Any, set[Candidate]] = {size: set() for size in sizes}
        for stage in stages:
            proposed = {size: [one for one in stage(size, times[size]) if one not in seen[size]] for size in sizes}
            if not self._columns(subject, captured, proposed, times):
                return times
            for size, candidates in proposed.items():
                seen[size].update(candidates)
        again = {size: [*fastest(times[size], LIKELY), *stages[0](size, times[size])] for size in sizes}
        right = {size: [one for one in dict.fromkeys(again[size]) if one in times[size]] for size in sizes}
        self._columns(subject, captured, right, times)
        return times

    def in_time(self) -> bool:
        """Whether no rank's time for what has begun is up; notes it where it is."""
        if self.world.any_of(time.monotonic() >= self.clock.until):
            self.cut_short = True
        return not self.cut_short

    @contextmanager
    def context(self, op: str, table: Table, num_bytes: int) -> Iterator[Context]:
        """With a communicator of this table and at least so many bytes of symmetric memory."""
        path = self.folder / "candidates.json"
        if self.world.rank == 0:
            path.write_text(table.to_json())
        with flycomm.init(
            self.group,
            world=self.world,
            target=self.target.name,
            max_bytes=num_bytes,
            timeout=self.timeout,
            fallback="error",
            table=path,
        ) as comm:
            what = Collective.of(op, None)
            yield Context(self.world, self.target, comm, self.group, self.stream, what, timeout=self.timeout)

    def _columns(
        self, subject: Subject, captured: bool, proposed: Mapping[Any, Sequence[Candidate]], times: Measured
    ) -> bool:
        """Measure all that is proposed; False if time was up before that."""
        for column in columns(proposed, subject.together):
            if not self._column(subject, captured, column, times):
                return False
        self.world.agree(hashlib.sha256(repr(times).encode()).digest(), "measured times")
        return True

    def _column(self, subject: Subject, captured: bool, column: Mapping[Any, Candidate], times: Measured) -> bool:
        """Measure a candidate each of several sizes; False once time is up."""
        capabilities = self.target.capabilities(self.world.device)
        table = subject.table(capabilities.arch, column)
        needed = max(*map(subject.num_bytes, column), budget(table, self.world.size, capabilities.graphs))
        with self.context(subject.op, table, needed) as context:
            for size, candidate in column.items():
                if not self.in_time():
                    return False
                problem = subject.problem(context, size)
                planned = subject.planned(context, size, captured)
                assert planned == candidate, (planned, candidate)
                method = self._method(subject.num_bytes(size), captured)
                outcome = measure(context, subject.contender(), problem, method, True)
                label = f"{subject.op}, {subject.label(size)}, {candidate}"
                if outcome.us is None:
                    self.wrong.append(f"{label}: the result is wrong by up to {outcome.max_error:g}; left out")
                else:
                    times[size][candidate] = min(outcome.us, times[size].get(candidate, outcome.us))
                self.advance(label)
        return True

    def _method(self, size: int, captured: bool) -> Method:
        calls, repeats = self.samples
        return Method("graph" if captured else "eager", max(BUFFERS, min(calls, _BYTES_A_SAMPLE // size)), repeats)


def columns(
    proposed: Mapping[Any, Sequence[Candidate]], together: Callable[[Mapping[Any, Candidate], Any, Candidate], bool]
) -> Iterator[dict[Any, Candidate]]:
    """The first candidate of every size, then the second of those that have one, and so on; each as soon as what its
    column has already lets it."""
    waiting = {size: list(candidates) for size, candidates in proposed.items()}
    while any(waiting.values()):
        column: dict[Any, Candidate] = {}
        for size, candidates in waiting.items():
            if candidates and together(column, size, candidates[0]):
                column[size] = candidates.pop(0)
        yield column


def fillers(*without: str) -> tuple[Row, ...]:
    """Rows of every operation but these, on which nothing is measured."""
    protocol, blocks, threads, capacity = _FILLER
    return tuple(
        Row(op, EVERY_WORLD, "any", None, protocol, blocks, threads, capacity) for op in OPS if op not in without
    )


def budget(table: Table, world: int, graphs: bool) -> int:
    """The least ``max_bytes`` with which every row of a table keeps its capacity."""
    layout = plan_layout(table, world, _NO_LIMIT, 1, graphs)
    channels = layout.num_bytes - layout.user_bytes
    return -(-channels * USER_SHARE // (USER_SHARE - 1)) + USER_SHARE


@contextmanager
def shared_folder(world: World) -> Iterator[Path]:
    """A folder of rank 0's that lives as long as the context; all ranks have its path. Collective."""
    with tempfile.TemporaryDirectory(prefix="flycomm-tune-") as own:
        yield Path(world.exchange(own.encode())[0].decode())
