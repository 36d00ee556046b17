# SPDX-License-Identifier: Apache-2.0
"""One rank's part of the command: measure, choose, and agree with the others on the table."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from flycomm.tables import OPS, Table
from flycomm.targets import Capabilities
from flycomm.tune import checks
from flycomm.tune.candidates import LIKELY, Candidate, Stage, Times, fastest
from flycomm.tune.crossings import Indexing, Mono
from flycomm.tune.fusing import Fused
from flycomm.tune.merge import Found, merged
from flycomm.tune.messages import Messages
from flycomm.tune.norms import Norms
from flycomm.tune.results import Tuned
from flycomm.tune.search import Clock, Measured, Search, shared_folder
from flycomm.tune.tiles import Tiles
from flycomm.tune.work import Settings, Work
from flycomm.validate import check_size
from flycomm.world import World


def run(world: World, group: Any, started: Started, settings: Settings) -> Tuned:
    """Collective: the same on every rank. Writes nothing."""
    check_size(world)
    target = settings.target
    target.runtime.set_device(world.device)
    found, sharing = checks.agreed_capabilities(world, target.capabilities(world.device))
    path = settings.out or tables.user_path(found.arch)
    checks.check_place(world, path)
    base = agreed_table(world, found.arch, str(settings.out) if settings.out and settings.out.is_file() else None)
    work = Work.of(base, world.size, found, sharing, settings)
    work.check(world, found, sharing)
    if settings.dry:
        return Tuned(path, base, [], [], work.planned(), False)

    how = settings.how(started)
    with _searching(world, group, settings, work.steps()) as search:
        rows, times = _rows(search, work, base, found, how)
        by_lane = _by_lane(rows)
        in_force = merged(base, found.arch, world.size, by_lane, found.graphs, how)
        for crossing in work.crossings:
            crossing.run(search, in_force)
    if not any(by_lane.values()) and not any(crossing.duels for crossing in work.crossings):
        raise UsageError(
            f"nothing was measured in --limit-seconds {settings.limit_s:g}, or nothing was right"
            f"{''.join(f'; {one}' for one in search.wrong)}; give more seconds"
        )
    mono = [line for one in work.crossings if isinstance(one, Mono) for line in one.lines()]
    indexer = [line for one in work.crossings if isinstance(one, Indexing) for line in one.lines()]
    table = merged(base, found.arch, world.size, by_lane, found.graphs, how, mono, indexer)
    world.agree(table.digest(), "tuned dispatch table")
    sections = [one.section(mode, times[one.op, mode], rows[one.op, mode]) for one, mode in work.lanes]
    sections += [crossing.section() for crossing in work.crossings]
    return Tuned(path, table, sections, _notes(search, work, rows, settings), [], bool(search.wrong))


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


def _rows(
    search: Search, work: Work, base: Table, found: Capabilities, how: tuple[str, str]
) -> tuple[dict[tuple[str, str], Any], dict[tuple[str, str], Measured]]:
    """``(choices, times)`` by operation and mode."""
    times: dict[tuple[str, str], Measured] = {}
    rows: dict[tuple[str, str], Any] = {}
    for one, mode in work.lanes:
        graph = times.get((one.op, "graph"))
        whole = one.stages() if graph is None else (_likely(graph),)
        if isinstance(one, Norms):
            one.in_force = merged(base, found.arch, search.world.size, _by_lane(rows), found.graphs, how)
        elif isinstance(one, Messages) and one.tiles is None:
            one.tiles = _tiles(search)
        captured = mode == "graph"
        times[one.op, mode] = search.run(one, captured, one.sizes, (one.known(captured), *whole))
        rows[one.op, mode] = one.found(times[one.op, mode], rows.get((one.op, "graph")))
    return rows, times


def _by_lane(rows: Mapping[tuple[str, str], Any]) -> Found:
    return {
        (op, mode == "graph"): found.rows if isinstance(found, Fused) else found or ()
        for (op, mode), found in rows.items()
    }


def _likely(graph: Measured) -> Stage:
    """Eager calls take as long as the CPU needs, and where they take longer, graphs have told which is fast."""

    def stage(size: Any, times: Times) -> list[Candidate]:
        return fastest(graph[size], LIKELY)

    return stage


def _tiles(search: Search) -> Tiles:
    on_gpu = search.stream is not None
    return Tiles(search.world.size, torch.device("cuda", search.world.device) if on_gpu else torch.device("cpu"))


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
        if stream is not None:
            with flycomm.init(group, world=world, target=target.name, table=tables.SHIPPED, fallback="error") as comm:
                warm(Context(world, target, comm, group, stream, Collective.of(OPS[0], None)))
        yield Search(world, group, target, stream, settings.timeout, settings.samples, clock, folder, advance)


# ------------------------------------------------------------------ what came out


def _notes(search: Search, work: Work, rows: Mapping[tuple[str, str], Any], settings: Settings) -> list[str]:
    notes = list(search.wrong)
    missing = sum(one.missing(rows[one.op, mode]) for one, mode in work.lanes)
    for one, mode in work.lanes:
        notes += one.notes(mode, rows[one.op, mode])
    for crossing in work.crossings:
        notes += [*dict.fromkeys(crossing.notes), *crossing.verdicts()]
        missing += crossing.missing
    if search.cut_short:
        notes.append(
            f"time was up after {settings.limit_s:g} s: not every candidate was measured"
            + (f", and nothing of {missing} sizes, which stay as they were" if missing else "")
            + "; give more with --limit-seconds"
        )
    return notes
