# SPDX-License-Identifier: Apache-2.0
"""``python -m flycomm bench all_reduce``: what it does, and what is printed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from flycomm import _console
from flycomm.bench import compare, options, plot, report, rows
from flycomm.bench.ranks import over_ranks
from flycomm.bench.run import Report
from flycomm.bench.run import run as run_rank
from flycomm.bench.subjects import SUBJECTS
from flycomm.errors import CommError


def main(arguments: Sequence[str] | None = None) -> int:
    """The whole command; returns the exit code: 0, 1 where a result is wrong or has nothing to be compared with, 2
    where it cannot run."""
    parser = argparse.ArgumentParser(prog="python -m flycomm bench", description="Check a call, then time it.")
    options.add_arguments(parser)
    return run(parser.parse_args(arguments))


def run(args: argparse.Namespace) -> int:
    """Do what parsed arguments say; returns the exit code."""
    try:
        if args.plot is not None:
            plot.require_matplotlib()
        old = None if args.compare is None else rows.load(args.compare)  # before --json appends to the same file
        if args.source is not None:
            return _finish(Report(rows.load(args.source)), args, old)
        settings = options.settings(args)
        if settings.json is not None:
            rows.append(settings.json, [])  # before anything is measured: can it be written?
        started, found = over_ranks(
            settings.target,
            args.world,
            bool(settings.against),
            lambda world, group, how: run_rank(world, group, how, settings),
            SUBJECTS[args.what].world,
        )
        return _finish(found, args, old) if started.reports else _code(found)
    except CommError as error:
        sys.stderr.write(f"flycomm bench{_who()}: {error}\n")
        return 2


def _finish(found: Report, args: argparse.Namespace, old: Sequence[rows.Row] | None) -> int:
    report.show(found.rows)
    for note in found.notes:
        _console.write(f"not compared with {note}" if not note.startswith("floors") else note)
    if sys.stdout.isatty() and find_spec("rich") is None:
        _console.write("(install flycomm[bench] for coloured tables and progress)")
    if args.plot is not None:
        plot.save(found.rows, args.plot)
        _console.write(f"drawn: {args.plot}")
    missing = old is not None and _compared(found, args, old)
    return 1 if missing else _code(found)


def _compared(found: Report, args: argparse.Namespace, old: Sequence[rows.Row]) -> bool:
    """Shows the comparison; whether a row is missing on either side."""
    comparison = compare.compare(old, found.rows, whole=args.source is not None)
    compare.show(comparison, str(args.compare))
    return bool(comparison.missing)


def _code(found: Report) -> int:
    return 0 if all(row["correct"] for row in found.rows if row["what"] != "floor") else 1


def _who() -> str:
    """In the messages of one of several processes."""
    rank = os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
    return "" if rank is None else f", rank {rank}"
