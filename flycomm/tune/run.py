# SPDX-License-Identifier: Apache-2.0
"""One rank's part of the command: measure, choose, and agree with the others on the table."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import flycomm
from flycomm import _console, tables
from flycomm.bench.collective import Collective
from flycomm.bench.contender import Context
from flycomm.bench.ranks import Started
from flycomm.bench.run import warm
from flycomm.communicator import agreed_table
from flycomm.errors import UsageError
from flycomm.geometry import Geometry
from flycomm.residency import Residency
from flycomm.tables import OPS, Row, Table
from flycomm.targets import Target
from flycomm.tune.candidates import LIKELY, Candidate, Grids, Stage, Times, fastest, stages
from flycomm.tune.checks import agreed_capabilities, check_memory, check_place
from flycomm.tune.choice import Choice, choose
from flycomm.tune.merge import merged
from flycomm.tune.search import Clock, Measured, Search, shared_folder
from flycomm.tune.tiles import Tiles
from flycomm.world import World


@dataclass(frozen=True)
class Settings:
    target: Target
    ops: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes of a rank's share, ascending powers of two
    modes: tuple[str, ...]  # "graph" before "eager"
    quick: bool
    limit_s: float
    samples: tuple[int, int]  # most calls of a sample, and repeats
    timeout: float | None
    out: Path | None  # None: where rank 0 looks first
    dry: bool  # measure nothing
    how: Callable[[Started], tuple[str, str]]  # what is measured, and by which command


@dataclass(frozen=True)
class Line:
    """A size's choice, and what the table before took for it (None: that was not measured)."""

    op: str
    mode: str
    choice: Choice
    before_us: float | None


@dataclass(frozen=True)
class Tuned:
    path: Path
    table: Table
    lines: Sequence[Line]
    notes: Sequence[str]
    planned: Sequence[tuple[str, str, int, int]]  # op, mode, bytes, candidates at most; of a dry run
    wrong: bool


def run(world: World, group: Any, started: Started, settings: Settings) -> Tuned:
    """Collective: the same on every rank. Writes nothing."""
    target = settings.target
    target.runtime.set_device(world.device)
    found, sharing = agreed_capabilities(world, target.capabilities(world.device))
    path = settings.out or tables.user_path(found.arch)
    check_place(world, path)
    base = agreed_table(world, found.arch, str(settings.out) if settings.out and settings.out.is_file() else None)
    check_memory(world, found, sharing, settings.ops, settings.sizes[-1])
    fits = Residency.of(found, sharing, 1, 0).fits if found.graphs else lambda grid: True
    grids = Grids.of(found.compute_units, found.graphs, settings.quick)
    lanes = [(op, mode) for mode in settings.modes for op in settings.ops]

    def at_most(op: str, mode: str, size: int) -> int:
        """How many measurements a size takes where all candidates are equally fast."""
        again = LIKELY + 1
        if mode == "eager" and "graph" in settings.modes:
            return 1 + LIKELY + again
        equal: dict[Candidate, float] = {}
        for stage in stages(op, world.size, grids, fits):
            equal |= dict.fromkeys(stage(size, equal), 1.0)
        return 1 + len(equal) + again

    if settings.dry:
        planned = [(op, mode, size, at_most(op, mode, size)) for op, mode in lanes for size in settings.sizes]
        return Tuned(path, base, [], [], planned, False)

    steps = [sum(at_most(op, mode, size) for size in settings.sizes) for op, mode in lanes]
    with _searching(world, group, settings, steps) as search:
        times: dict[tuple[str, str], Measured] = {}
        for op, mode in lanes:
            captured, graph = mode == "graph", times.get((op, "graph"))
            known = _known(base, op, world.size, captured, fits)
            whole = stages(op, world.size, grids, fits) if graph is None else (_likely(graph),)
            times[op, mode] = search.run(op, captured, settings.sizes, known, whole)
    chosen = _chosen(times)
    if not any(chosen.values()):
        raise UsageError(
            f"nothing was measured in --limit-seconds {settings.limit_s:g}, or nothing was right"
            f"{''.join(f'; {one}' for one in search.wrong)}; give more seconds"
        )
    by_lane = {(op, mode == "graph"): choices for (op, mode), choices in chosen.items()}
    table = merged(base, found.arch, world.size, by_lane, found.graphs, settings.how(started))
    world.agree(table.digest(), "tuned dispatch table")
    lines = [
        Line(op, mode, choice, _before(base, op, world.size, mode, choice.num_bytes, times[op, mode]))
        for (op, mode), choices in chosen.items()
        for choice in choices
    ]
    return Tuned(path, table, lines, _notes(search, chosen, settings), [], bool(search.wrong))


def write(path: Path, table: Table) -> None:
    """All of it or nothing: other processes read it when they begin."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(table.to_json())
        os.replace(partial, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); name another file with --out") from None


# ------------------------------------------------------------------ what to measure


def _row(base: Table, op: str, world: int, captured: bool, size: int) -> Row:
    return next(row for row in base.of(op, world, captured) if row.largest is None or size <= row.largest)


def _known(base: Table, op: str, world: int, captured: bool, fits: Callable[[Geometry], bool]) -> Stage:
    """What the table before has for a size: what is chosen should not be slower."""

    def stage(size: int, times: Times) -> list[Candidate]:
        one = Candidate.in_force(_row(base, op, world, captured, size), size)
        return [one] if fits(one.geometry) else []

    return stage


def _likely(graph: Mapping[int, Times]) -> Stage:
    """Eager calls take as long as the CPU needs, and where they take longer, graphs have told which is fast."""

    def stage(size: int, times: Times) -> list[Candidate]:
        return fastest(graph[size], LIKELY)

    return stage


@contextmanager
def _searching(world: World, group: Any, settings: Settings, steps: list[int]) -> Iterator[Search]:
    target = settings.target
    clock = Clock(time.monotonic() + settings.limit_s, list(steps))
    stream = torch.cuda.Stream(world.device) if target.runtime.torch_device_type == "cuda" else None
    shown: AbstractContextManager[Callable[[str], None]] = nullcontext(lambda done: None)
    if world.rank == 0:
        shown = _console.progress(sum(steps))
    with (
        torch.cuda.stream(stream) if stream is not None else nullcontext(),
        shared_folder(world) as folder,
        shown as advance,
    ):
        device = torch.device("cpu") if stream is None else torch.device("cuda", world.device)
        tiles = Tiles(world.size, device)
        if stream is not None:
            with flycomm.init(group, world=world, target=target.name, table=tables.SHIPPED, fallback="error") as comm:
                warm(Context(world, target, comm, group, stream, Collective.of(OPS[0], None)))
        yield Search(world, group, target, stream, settings.timeout, settings.samples, clock, folder, advance, tiles)


# ------------------------------------------------------------------ what came out


def _chosen(times: Mapping[tuple[str, str], Measured]) -> dict[tuple[str, str], list[Choice]]:
    chosen: dict[tuple[str, str], list[Choice]] = {}
    for (op, mode), measured in times.items():
        graph = {one.num_bytes: one.candidate for one in chosen.get((op, "graph"), ())}
        chosen[op, mode] = choose(measured, graph)
    return chosen


def _before(base: Table, op: str, world: int, mode: str, size: int, times: Measured) -> float | None:
    return times[size].get(Candidate.in_force(_row(base, op, world, mode == "graph", size), size))


def _notes(search: Search, chosen: Mapping[tuple[str, str], Sequence[Choice]], settings: Settings) -> list[str]:
    notes = list(search.wrong)
    if search.cut_short:
        missing = sum(len(settings.sizes) - len(choices) for choices in chosen.values())
        notes.append(
            f"time was up after {settings.limit_s:g} s: not every candidate was measured"
            + (f", and nothing of {missing} sizes, which stay as they were" if missing else "")
            + "; give more with --limit-seconds"
        )
    return notes
