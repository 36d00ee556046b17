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
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import flycomm
from flycomm.bench.collective import Collective
from flycomm.bench.contender import Context
from flycomm.bench.harness import Method, measure
from flycomm.bench.ours import Flycomm
from flycomm.bench.problem import BUFFERS
from flycomm.channel import MAX_WORLD
from flycomm.geometry import SMALLEST_CLASS
from flycomm.layout import USER_SHARE, plan_layout
from flycomm.tables import OPS, Row, Table
from flycomm.targets import Target
from flycomm.tune.candidates import LIKELY, Candidate, Stage, fastest
from flycomm.tune.tiles import Tiled, Tiles
from flycomm.world import World

_EVERY_WORLD = (1, MAX_WORLD)
_FILLER = ("flags", 1, 64, SMALLEST_CLASS)  # for operations that are not measured: a table has rows of all
_NO_LIMIT = 1 << 44  # bytes
_BYTES_A_SAMPLE = 32 << 20  # that a rank's calls of one sample move, at least BUFFERS calls

Measured = dict[int, dict[Candidate, float]]  # bytes → candidate → µs a call


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
    tiles: Tiles
    wrong: list[str] = field(default_factory=list)
    cut_short: bool = False

    def run(self, op: str, captured: bool, sizes: Sequence[int], known: Stage, stages: Sequence[Stage]) -> Measured:
        """The times of every candidate that the stages name and that gave the right bits, as far as time allows.

        ``known`` names what the others are compared with. It, and what is fastest, is measured again at the end, since
        machines are slower at one time than at another; the lesser time counts.
        """
        self.clock.begin()
        times: Measured = {size: {} for size in sizes}
        seen: dict[int, set[Candidate]] = {size: set() for size in sizes}
        for stage in (known, *stages):
            proposed = {size: [one for one in stage(size, times[size]) if one not in seen[size]] for size in sizes}
            if not self._columns(op, captured, proposed, times):
                return times
            for size, candidates in proposed.items():
                seen[size].update(candidates)
        again = {size: [*fastest(times[size], LIKELY), *known(size, times[size])] for size in sizes}
        right = {size: [one for one in dict.fromkeys(again[size]) if one in times[size]] for size in sizes}
        self._columns(op, captured, right, times)
        return times

    def _columns(self, op: str, captured: bool, proposed: Mapping[int, Sequence[Candidate]], times: Measured) -> bool:
        """Measure all that is proposed; False if time was up before that."""
        for column in columns(proposed):
            if not self._column(op, captured, column, times):
                self.cut_short = True
                return False
        self.world.agree(hashlib.sha256(repr(times).encode()).digest(), "measured times")
        return True

    def _column(self, op: str, captured: bool, column: Mapping[int, Candidate], times: Measured) -> bool:
        """Measure a candidate each of several sizes; False once time is up."""
        with self._communicator(candidate_table(self._arch, op, column), max(column)) as comm:
            what = Collective.of(op, None)
            context = Context(self.world, self.target, comm, self.group, self.stream, what)
            for size, candidate in column.items():
                if self.world.any_of(time.monotonic() >= self.clock.until):
                    return False
                problem = Tiled(context, self.tiles, size)
                row = Flycomm.plan(context, problem.case, captured).row
                assert row is not None
                assert Candidate.in_force(row, size) == candidate, (row, candidate)
                outcome = measure(context, Flycomm(), problem, self._method(size, captured), True)
                label = f"{op}, {size} bytes, {candidate.protocol} {candidate.blocks} × {candidate.threads}"
                if outcome.us is None:
                    self.wrong.append(f"{label}: the result is wrong by up to {outcome.max_error:g}; left out")
                else:
                    times[size][candidate] = min(outcome.us, times[size].get(candidate, outcome.us))
                self.advance(label)
        return True

    @property
    def _arch(self) -> str:
        return self.target.capabilities(self.world.device).arch

    def _method(self, size: int, captured: bool) -> Method:
        calls, repeats = self.samples
        return Method("graph" if captured else "eager", max(BUFFERS, min(calls, _BYTES_A_SAMPLE // size)), repeats)

    @contextmanager
    def _communicator(self, table: Table, largest: int) -> Iterator[flycomm.Communicator]:
        path = self.folder / "candidates.json"
        if self.world.rank == 0:
            path.write_text(table.to_json())
        graphs = self.target.capabilities(self.world.device).graphs
        with flycomm.init(
            self.group,
            world=self.world,
            target=self.target.name,
            max_bytes=max(largest, budget(table, self.world.size, graphs)),
            timeout=self.timeout,
            fallback="error",
            table=path,
        ) as comm:
            yield comm


def columns(proposed: Mapping[int, Sequence[Candidate]]) -> Iterator[dict[int, Candidate]]:
    """The first candidate of every size, then the second of those that have one, and so on."""
    for column in zip_longest(*proposed.values()):
        yield {size: one for size, one in zip(proposed, column, strict=True) if one is not None}


def candidate_table(arch: str, op: str, column: Mapping[int, Candidate]) -> Table:
    """A table in which messages of each size go as the candidate says."""
    rows = [candidate.row(op, _EVERY_WORLD, size) for size, candidate in sorted(column.items())]
    rows[-1] = replace(rows[-1], largest=None)
    protocol, blocks, threads, capacity = _FILLER
    rows += [Row(other, _EVERY_WORLD, "any", None, protocol, blocks, threads, capacity) for other in OPS if other != op]
    return Table(arch, "measured", "candidates of tune", tuple(rows))


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
