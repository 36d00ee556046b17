# SPDX-License-Identifier: Apache-2.0
"""``python -m flycomm tune``: what it does, what it writes, and what is printed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from flycomm import _console, env, tables, targets
from flycomm.bench.ranks import over_ranks
from flycomm.errors import CommError
from flycomm.tune import options, report
from flycomm.tune.results import Tuned
from flycomm.tune.run import run, write
from flycomm.tune.work import Settings


def main(arguments: Sequence[str] | None = None) -> int:
    """The whole command; returns the exit code: 0, 1 where a candidate gave a wrong result, 2 where it cannot run."""
    parser = argparse.ArgumentParser(
        prog="python -m flycomm tune",
        description="Measure which protocol and grid is fastest for which size, and from where on one kernel for "
        "several, or sharing, pays; leave a table that init uses.",
    )
    options.add_arguments(parser)
    args = parser.parse_args(arguments)
    try:
        if args.show:
            return _show(args.target, args.out)
        settings = options.settings(args)
        started, tuned = over_ranks(
            settings.target, args.world, settings.with_group, lambda world, group, how: run(world, group, how, settings)
        )
        if started.reports:
            _finish(tuned, settings, started.world_size)
        return 1 if tuned.wrong else 0
    except CommError as error:
        sys.stderr.write(f"flycomm tune{_who()}: {error}\n")
        return 2


def _finish(tuned: Tuned, settings: Settings, world: int) -> None:
    device = settings.target.capabilities(0).device_name
    where = f"{world} rank{'s' if world > 1 else ''} on {settings.target.name} ({device})"
    if settings.dry:
        report.show_plan(tuned, where)
        return
    report.show(tuned, where)
    write(tuned.path, tuned.table)
    _console.write(f"written: {tuned.path}")
    in_force = tables.place(tuned.table.arch)
    if in_force is None or in_force.absolute() != tuned.path.absolute():
        _console.write(
            f"in force is {in_force or 'the shipped table'}; to use this one, set {env.TABLE.name}={tuned.path}, or "
            "pass it to init as table="
        )


def _show(target_name: str | None, path: Path | None) -> int:
    arch = targets.pick(target_name).capabilities(0).arch
    asked = None if path is None else str(path)
    table, place = tables.load(arch, asked), tables.place(arch, asked)
    report.show_table(table, "it came with flycomm" if place is None else str(place))
    return 0


def _who() -> str:
    """In the messages of one of several processes."""
    rank = os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
    return "" if rank is None else f", rank {rank}"
