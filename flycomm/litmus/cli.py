# SPDX-License-Identifier: Apache-2.0
"""``python -m flycomm litmus``: its options, and what it prints."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flycomm import __version__, _console, env, targets
from flycomm.bench.ranks import Started, over_ranks
from flycomm.errors import CommError, UsageError
from flycomm.kernels._litmus_plan import ORDERS, SHAPES
from flycomm.litmus import verdict
from flycomm.litmus.run import Result, Settings, run
from flycomm.world import World

_ROUNDS, _HOST_ROUNDS = 1_000_000, 500
_SECONDS = 10.0  # that a wait may last


def main(arguments: Sequence[str] | None = None) -> int:
    """The whole command; the exit code is 0, 1 where a forbidden outcome was seen, 2 where it cannot run."""
    args = _parser().parse_args(arguments)
    targets.expect_virtual_ranks()  # before a driver starts
    try:
        settings = _settings(args)
        if args.json not in (None, "-"):
            _check_file(Path(args.json))
        default = max(2, settings.target.runtime.device_count())
        started, results = over_ranks(
            settings.target, args.world, False, lambda world, _, how: _ranks(world, how, settings), default
        )
    except CommError as error:
        sys.stderr.write(f"flycomm litmus: {error}\n")
        return 2
    if started.reports:
        _report(args.json, _described(settings, started, results), results)
    return 1 if any(one.forbidden for one in results) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flycomm litmus", description="In which order do ranks see each other's stores?"
    )
    add = parser.add_argument
    add("--world", type=int, metavar="N", help="virtual ranks (default: the GPUs, at least 2; not under torchrun)")
    add("--target", choices=targets.NAMES, help="default: FLYCOMM_TARGET, else the first that can run")
    add("--rounds", type=int, metavar="N", help=f"of each test (default {_ROUNDS}, on the host target {_HOST_ROUNDS})")
    add("--shape", metavar="A,B", help=f"{', '.join(SHAPES)} (default: all)")
    add("--order", metavar="A,B", help=f"{', '.join(ORDERS)} (default: all)")
    add("--seed", type=int, default=1, metavar="N", help="of the times at which threads begin (default 1)")
    add("--timeout", type=float, default=_SECONDS, metavar="S", help=f"of one wait (default {_SECONDS:g} seconds)")
    add(
        "--json", nargs="?", const="-", metavar="FILE", help="write one JSON object there; without FILE, print it alone"
    )
    return parser


def _settings(args: argparse.Namespace) -> Settings:
    target = targets.pick(args.target)
    targets.activate(target)
    default = _HOST_ROUNDS if _is_host(target) else _ROUNDS
    rounds = default if args.rounds is None else args.rounds
    if rounds < 1:
        raise UsageError(f"--rounds {rounds} is too few; give at least 1")
    shapes, orders = _chosen("--shape", args.shape, SHAPES), _chosen("--order", args.order, ORDERS)
    cases = tuple(case for case in verdict.CASES if case[0] in shapes and case[1] in orders)
    if not cases:
        raise UsageError(f"--shape {args.shape} has no order {args.order}; leave one of them out")
    return Settings(target, cases, rounds, args.seed, args.timeout)


def _is_host(target: targets.Target) -> bool:
    return target.runtime.torch_device_type == "cpu"


def _chosen(option: str, text: str | None, known: Sequence[str]) -> list[str]:
    names = list(known) if text is None else [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"{option} {unknown[0]!r} is not one of {', '.join(known)}; pass one of these")
    return names


def _ranks(world: World, started: Started, settings: Settings) -> list[Result]:
    shown = started.reports and world.rank == 0
    with _console.progress(len(settings.cases)) if shown else nullcontext(lambda name: None) as done:
        return run(world, settings, done)


def _described(settings: Settings, started: Started, results: Sequence[Result]) -> dict[str, Any]:
    capabilities = settings.target.capabilities(0)
    return {
        "flycomm": __version__,
        "target": settings.target.name,
        "device": capabilities.device_name,
        "arch": capabilities.arch,
        "world": started.world_size,
        "processes": not started.local,
        "weak_mode": _is_host(settings.target) and env.HOST_WEAK.get(),
        "seed": settings.seed,
        "tests": [asdict(one) | {"weak_is_forbidden": verdict.forbids_weak(one.shape, one.order)} for one in results],
    }


def _report(where: str | None, described: dict[str, Any], results: Sequence[Result]) -> None:
    if where == "-":
        _console.write(json.dumps(described, indent=1))
        return
    title = f"{described['world']} ranks on {described['target']}: {described['device']}"
    if described["weak_mode"]:
        title += f", {env.HOST_WEAK.name}=1"
    _console.table(
        title,
        ("shape", "order", "rounds", "executions", "forbidden seen", "weak seen", "weak is"),
        [_row(one) for one in results],
    )
    if where is not None:
        Path(where).write_text(json.dumps(described, indent=1) + os.linesep)


def _check_file(path: Path) -> None:
    """Before anything is measured: make its folder, and raise :class:`UsageError` if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); name another file for --json") from None


def _row(one: Result) -> list[str]:
    numbers = [f"{number:,}" for number in (one.rounds, one.executions, one.forbidden, one.weak)]
    return [one.shape, one.order, *numbers, "forbidden" if verdict.forbids_weak(one.shape, one.order) else "allowed"]
