# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual + RMSNorm in one kernel, as :mod:`~flycomm.tune.search` measures it: sizes are bench's cases.

Beside the candidates, the same call without a row, which goes by separate kernels: where that is faster, no row is to
take it. A row takes a token row a block, so usual grids have a block a row, and others as many as the most rows of any
case want: one such grid may serve all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flycomm.bench import labels
from flycomm.bench.contender import Context
from flycomm.bench.problem import Case, Checked
from flycomm.bench.subjects import norm
from flycomm.bench.units import format_bytes
from flycomm.channel import FRAGMENT_BYTES
from flycomm.geometry import Geometry, size_class
from flycomm.kernels.reduce_norm import each_thread, slot_bytes
from flycomm.tables import PROTOCOLS, Table, carries
from flycomm.tune.candidates import Candidate, Grids, Stage, Times, close, worth_whole
from flycomm.tune.fusing import OP, SEPARATE, Fused, row_of, what_pays
from flycomm.tune.results import Section, compared
from flycomm.tune.search import EVERY_WORLD, Measured, fillers

_MOST_EACH = 8  # fragments of a row that a thread holds: more do not stay in registers


@dataclass
class Norms:
    """``base``: the table before; ``in_force``: with what has been found since. ``fits``: of a row's counted grid."""

    sizes: Sequence[Case]
    world: int
    base: Table
    grids: Grids
    fits: Callable[[Geometry], bool]
    in_force: Table
    op: str = OP
    _problems: dict[Case, Checked] = field(default_factory=dict)

    def num_bytes(self, size: Case) -> int:
        return size.num_bytes

    def label(self, size: Case) -> str:
        return labels.size(size.fields())

    def together(self, column: Mapping[Case, Candidate], size: Case, candidate: Candidate) -> bool:
        """A row is found by bytes, and without one nothing that is shorter may have one."""
        alone = candidate == SEPARATE
        return all((one == SEPARATE) == alone and known.num_bytes != size.num_bytes for known, one in column.items())

    def table(self, arch: str, column: Mapping[Case, Candidate]) -> Table:
        if SEPARATE in column.values():
            return replace(self.in_force, arch=arch, rows=tuple(row for row in self.in_force.rows if row.op != OP))
        rows = [row_of(one, EVERY_WORLD, size.num_bytes) for size, one in column.items()]
        by_size = sorted(rows, key=lambda row: row.largest or 0)
        return Table(arch, "measured", "candidates of tune", (*fillers(), *by_size))

    def problem(self, context: Context, size: Case) -> Checked:
        """Made once: what must come out takes the CPU longer than a measurement takes."""
        if size not in self._problems:
            self._problems[size] = norm.NormProblem(context, size)
        return self._problems[size]

    def contender(self) -> norm.FlycommNorm:
        return norm.FlycommNorm()

    def planned(self, context: Context, size: Case, captured: bool) -> Candidate:
        row = norm.plan(context, size, captured).row
        return SEPARATE if row is None else _candidate(size, row.protocol, row.geometry)

    def known(self, captured: bool) -> Stage:
        """What the table before has for a case, and separate kernels."""

        def stage(size: Case, times: Times) -> list[Candidate]:
            return list(dict.fromkeys([self._before(size, captured), SEPARATE]))

        return stage

    def stages(self) -> tuple[Stage, ...]:
        def usual(size: Case, times: Times) -> list[Candidate]:
            return [one for each in _protocols(size) for one in self._fitting(size, [each], self._grids(size))[:1]]

        def others(size: Case, times: Times) -> list[Candidate]:
            fused = {one: us for one, us in times.items() if one != SEPARATE}
            near = close(fused) if fused else {}
            return self._fitting(size, [one for one in _protocols(size) if one in near], self._grids(size))

        return usual, others

    def found(self, times: Measured, graph: Fused | None) -> Fused | None:
        """None where no case has a candidate that is right; ``graph``: of captured calls, where they were measured."""
        return what_pays(times, self.world, graph)

    def section(self, mode: str, times: Measured, found: Fused | None) -> Section:
        columns = ["rows × hidden", "protocol", "grid", "µs", "separate", "gain", "before", "gain"]
        chosen = {one.num_bytes: one.candidate for one in found.choices} if found else {}
        lines = []
        for size, measured in times.items():
            taken = _as_measured(chosen.get(size.num_bytes, SEPARATE), measured)
            if taken in measured:
                us, before = measured[taken], measured.get(self._before(size, mode == "graph"))
                grid = "" if taken == SEPARATE else f"{taken.blocks} × {taken.threads}"
                gains = [*compared(us, measured.get(SEPARATE)), *compared(us, before)[1:]]
                lines.append([self.label(size), taken.protocol, grid, *gains])
        return Section(self.op, mode, columns, lines)

    def missing(self, found: Fused | None) -> int:
        known = set() if found is None else {*(one.num_bytes for one in found.choices), *found.unfused}
        return sum(size.num_bytes not in known for size in self.sizes)

    def notes(self, mode: str, found: Fused | None) -> list[str]:
        said = []
        if found is not None and found.unfused:
            least = format_bytes(found.unfused[0])
            said.append(f"{OP}, {mode}: separate kernels are faster from {least} on, so nothing as long is fused")
        if found is not None and found.lost:
            sizes = ", ".join(map(format_bytes, found.lost))
            said.append(
                f"{OP}, {mode}: separate kernels are faster at {sizes} too; a table cannot leave these out, since "
                "longer ones are faster fused"
            )
        return said

    def _before(self, size: Case, captured: bool) -> Candidate:
        for row in self.base.of(OP, self.world, captured):
            takes = _slot(size, row.geometry) <= row.capacity and size.num_bytes <= (row.largest or 0)
            if takes and self.fits(row.counted):
                return _candidate(size, row.protocol, row.geometry)
        return SEPARATE

    def _grids(self, size: Case) -> list[Geometry]:
        """The usual one first."""
        rows, most = size.rows or 1, max(one.rows or 1 for one in self.sizes)
        fragments = -(-_row_bytes(size) // FRAGMENT_BYTES)
        held = {threads: each_thread(size.hidden or 0, size.dtype, threads) for threads in self.grids.threads}
        threads = [one for one in held if held[one] <= _MOST_EACH] or [max(held)]
        useful = [one for one in threads if one == threads[0] or one <= 2 * fragments]
        blocks = [self.grids.a_block_each(rows), self.grids.a_block_each(most)]
        return list(dict.fromkeys(Geometry(count, each) for count in blocks for each in useful))

    def _fitting(self, size: Case, protocols: Sequence[str], grids: Sequence[Geometry]) -> list[Candidate]:
        found = [_candidate(size, protocol, grid) for protocol in protocols for grid in grids]
        return [one for one in found if self.fits(row_of(one, EVERY_WORLD, size.num_bytes).counted)]


def _candidate(size: Case, protocol: str, grid: Geometry) -> Candidate:
    return Candidate(protocol, grid.blocks, grid.threads, size_class(_slot(size, grid)))


def _slot(size: Case, grid: Geometry) -> int:
    return slot_bytes(size.rows or 0, size.hidden or 0, size.dtype, grid.blocks, grid.threads)


def _row_bytes(size: Case) -> int:
    return size.num_bytes // (size.rows or 1)


def _protocols(size: Case) -> list[str]:
    return [one for one in PROTOCOLS if carries(one, OP, "sum") and worth_whole(one, size.num_bytes)]


def _as_measured(chosen: Candidate, measured: Times) -> Candidate:
    """The candidate of a case whose grid was chosen for its bytes: cases of as many bytes may need less room."""
    same = [one for one in measured if (one.protocol, one.geometry) == (chosen.protocol, chosen.geometry)]
    return same[0] if same else chosen
