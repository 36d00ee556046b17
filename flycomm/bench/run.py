# SPDX-License-Identifier: Apache-2.0
"""A run: every case against every baseline, and the floors, on one rank of the world."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

import flycomm
from flycomm import _console
from flycomm.bench import baselines, floors, labels, origin, rows, straggler
from flycomm.bench.budget import budget
from flycomm.bench.contender import Context
from flycomm.bench.harness import BaselineError, Method, Outcome, measure, measure_best
from flycomm.bench.problem import Checked
from flycomm.bench.ranks import Started
from flycomm.bench.settings import Settings
from flycomm.errors import PeerAccessError
from flycomm.world import World

_WARM_S = 0.5  # of work before the first case: clocks of an idle GPU are low


@dataclass
class Report:
    rows: list[rows.Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def run(world: World, group: Any, started: Started, settings: Settings) -> Report:
    """Collective. The same report on every rank; rank 0 writes rows to the file as they come."""
    target = settings.target
    runtime = target.runtime
    runtime.set_device(world.device)
    stream = torch.cuda.Stream(world.device) if runtime.torch_device_type == "cuda" else None
    with (
        torch.cuda.stream(stream) if stream is not None else nullcontext(),
        flycomm.init(
            group,
            world=world,
            target=target.name,
            max_bytes=budget(
                target,
                world,
                settings.collective,
                settings.method.mode == "graph",
                settings.sizes,
                settings.topk,
                settings.table,
            ),
            table=settings.table,
            topk=settings.topk,
            timeout=settings.timeout,
            fallback=settings.fallback if group is not None else "error",
        ) as comm,
    ):
        replay = torch.cuda.default_stream(world.device) if stream and settings.replay_on == "default" else None
        context = Context(world, target, comm, group, stream, settings.collective, replay, settings.timeout)
        return _measure_all(context, started, settings)


def _measure_all(context: Context, started: Started, settings: Settings) -> Report:
    report, subject = Report(), settings.subject
    common = {
        "what": settings.collective.name,
        "reduction": settings.collective.reduction,
        "target": context.target.name,
        "device": context.target.capabilities(context.world.device).device_name,
        "world": context.world.size,
        "mode": settings.method.mode,
        "replay_on": settings.replay_on if settings.method.mode == "graph" else None,
        "straggler_us": settings.method.straggler_us or None,
        "commit": settings.commit,
        "command": origin.command(started.launcher, settings.collective.name, _options(settings, started)),
    }
    names, reasons = baselines.usable(context, settings.against)
    if settings.explicit:
        for name, reason in reasons.items():
            report.note(f"{name}: {reason}")
        names = list(settings.against)
    shown: AbstractContextManager[Callable[[str], None]] = nullcontext(lambda done: None)
    if context.world.rank == 0:
        shown = _console.progress(len(settings.cases) * (1 + len(names)) + settings.floors)
    with shown as advance:
        warm(context)
        if settings.method.straggler_us:
            straggler.prepare(context)
        for case in settings.cases:
            problem = subject.problem(context, case)
            label = f"{labels.size(case.fields())}, {case.dtype}"
            protocol = subject.protocol(context, case, settings.method.mode == "graph")
            outcome = measure(context, subject.contender(), problem, settings.method, protocol != "fallback")
            advance(f"flycomm, {label}")
            others: dict[str, Outcome | None] = {}
            for name in names:
                others[name] = None if name in reasons else _against(context, name, problem, settings.method, report)
                advance(f"{name}, {label}")
            read_bytes = subject.read_bytes(case, context.world.size) if subject.read_bytes is not None else None
            _add(report, rows.of_case(common, case, protocol, outcome, others, read_bytes), context, settings)
        if settings.floors:
            _add(report, _floor_rows(context, common, settings, report), context, settings)
            advance("floors")
    return report


def _options(settings: Settings, started: Started) -> dict[str, Any]:
    return ({"world": started.world_size} if started.local else {}) | settings.command


def _against(context: Context, name: str, problem: Checked, method: Method, report: Report) -> Outcome | None:
    try:
        return measure_best(context, baselines.REGISTRY[name], problem, method)
    except BaselineError as error:
        report.note(f"{name}: {error}")
        return None


def _floor_rows(context: Context, common: dict[str, Any], settings: Settings, report: Report) -> Sequence[rows.Row]:
    captured = settings.method.mode == "graph"
    grid = settings.subject.grid
    grids = {case.num_bytes: grid(context, case, captured) for case in settings.cases} if grid is not None else {}
    try:
        found = floors.measure(context, dict(sorted(grids.items())), settings.method)
    except PeerAccessError as error:
        report.note(f"floors: {error}")
        return []
    if missing := floors.names(context) - {floor.name for floor in found}:
        report.note(f"floors: {', '.join(sorted(missing))} could not be measured, because a write did not arrive")
    return [rows.of_floor(common, floor) for floor in found]


def _add(report: Report, new: Sequence[rows.Row], context: Context, settings: Settings) -> None:
    report.rows += new
    if settings.json is not None and context.world.rank == 0:
        rows.append(settings.json, new)


def warm(context: Context) -> None:
    """Raise the clocks of this rank's GPU, which are low while it idles."""
    if context.stream is None:
        return
    ballast = torch.ones(1 << 24, device=context.device)
    end = time.monotonic() + _WARM_S
    while time.monotonic() < end:
        ballast.mul_(1.0)
        context.synchronize()
