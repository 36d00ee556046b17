# SPDX-License-Identifier: Apache-2.0
"""``python -m flycomm bench all_reduce``: options, and what is printed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import flycomm
from flycomm import _console, targets
from flycomm.bench import baselines, plot, report, rows
from flycomm.bench.harness import BUFFERS, Case, Method
from flycomm.bench.ranks import over_ranks
from flycomm.bench.reference import DTYPES
from flycomm.bench.run import Report, Settings
from flycomm.bench.run import run as run_rank
from flycomm.bench.units import format_bytes, parse_bytes, parse_list
from flycomm.errors import CommError, UsageError

_SIZES = "2KiB,8KiB,32KiB,128KiB"
_DEFAULTS = {"graph": (50, 100), "eager": (20, 20)}  # mode: calls a replay or sample, repeats


def main(arguments: Sequence[str] | None = None) -> int:
    """The whole command; returns the exit code: 0, 1 where a result is wrong, 2 where it cannot run."""
    parser = argparse.ArgumentParser(prog="python -m flycomm bench", description="Check a collective, then time it.")
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bench``."""
    add = parser.add_argument
    add("what", choices=("all_reduce",), help="the collective")
    add(
        "--world", type=int, metavar="N", help="virtual ranks of this process (default 2; not under torchrun or mpirun)"
    )
    add("--target", choices=targets.NAMES, help="default: FLYCOMM_TARGET, else the first that can run")
    add("--bytes", default=_SIZES, metavar="A,B", help=f"message sizes (default {_SIZES})")
    add("--dtype", default="bf16", metavar="A,B", help=f"any of {', '.join(DTYPES)} (default bf16)")
    add("--mode", choices=tuple(_DEFAULTS), help="how to time (default: graph where the target has graphs, else eager)")
    add(
        "--replay-on",
        choices=("own", "default"),
        default="own",
        help="stream of graph replays: their own (default), or torch's default one, as in a plain graph.replay()",
    )
    add("--against", default="auto", metavar="A,B", help=f"all, auto (comes with torch), none, or {_names()}")
    add("--calls", type=int, metavar="N", help="calls in a replay (graph, default 50) or a sample (eager, default 20)")
    add("--repeats", type=int, metavar="N", help="replays (default 100) or samples (default 20); the median counts")
    add("--floors", action=argparse.BooleanOptionalAction, help="measure what no kernel can beat (default: on a GPU)")
    add("--fallback", choices=("group", "error"), default="group", help="what flycomm does with a call it cannot do")
    add("--timeout", type=float, metavar="S", help="seconds that a wait in a kernel may last (default FLYCOMM_TIMEOUT)")
    add("--commit", metavar="TEXT", help="what the rows say of the code measured (default: git is asked)")
    add("--json", type=Path, metavar="FILE", help="append the results to a file, a JSON object a line")
    add("--plot", type=Path, metavar="FILE", help="draw latency over size (png, svg, pdf)")
    add("--from", dest="source", type=Path, metavar="FILE", help="measure nothing: show results that --json wrote")


def run(args: argparse.Namespace) -> int:
    """Do what parsed arguments say; returns the exit code."""
    try:
        if args.plot is not None:
            plot.require_matplotlib()
        if args.source is not None:
            return _finish(Report(rows.load(args.source)), args.plot)
        settings = _settings(args)
        started, found = over_ranks(
            settings.target,
            args.world,
            bool(settings.against),
            lambda world, group, how: run_rank(world, group, how, settings),
        )
        return _finish(found, args.plot) if started.reports else _code(found)
    except CommError as error:
        sys.stderr.write(f"flycomm bench{_who()}: {error}\n")
        return 2


def _settings(args: argparse.Namespace) -> Settings:
    """Arguments, checked: everything that can be refused before a rank is started."""
    target = targets.pick(args.target)
    targets.activate(target)
    graphs = target.capabilities(0).graphs
    mode = args.mode or ("graph" if graphs else "eager")
    if mode == "graph" and not graphs:
        raise UsageError(
            f"mode graph needs launches that can be captured, which target {target.name} has not; use eager"
        )
    default_calls, default_repeats = _DEFAULTS[mode]
    calls = default_calls if args.calls is None else args.calls
    repeats = default_repeats if args.repeats is None else args.repeats
    if calls < BUFFERS or repeats < 1:
        raise UsageError(f"--calls {calls} --repeats {repeats} is too little; give at least {BUFFERS} calls, 1 repeat")
    if args.world is not None and args.world < 1:
        raise UsageError(f"--world {args.world} is not a number of ranks; give at least 1")
    cases = parse_cases(args.bytes, args.dtype)
    floors = graphs if args.floors is None else args.floors
    against = parse_list(args.against)
    names = baselines.wanted(against)
    sizes = ",".join(dict.fromkeys(format_bytes(case.num_bytes).replace(" ", "") for case in cases))
    command: dict[str, Any] = {
        "target": target.name,
        "bytes": sizes,
        "dtype": ",".join(dict.fromkeys(case.dtype for case in cases)),
        "mode": mode,
        "against": ",".join(against),
        "calls": calls,
        "repeats": repeats,
        "fallback": args.fallback,
        "floors": floors,
        "replay-on": args.replay_on,
    }
    return Settings(
        target=target,
        cases=cases,
        method=Method(mode, calls, repeats),
        against=tuple(names),
        explicit=against == names,
        floors=floors,
        timeout=args.timeout,
        fallback=args.fallback,
        replay_on=args.replay_on,
        commit=args.commit or rows.commit(Path(flycomm.__file__).resolve().parents[1]),
        command=command,
        json=args.json,
    )


def parse_cases(sizes: str, dtypes: str) -> tuple[Case, ...]:
    """Every size with every dtype, dtype by dtype. Raises :class:`UsageError` for what is not a case."""
    cases = []
    for dtype in parse_list(dtypes):
        if dtype not in DTYPES:
            raise UsageError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}; use these")
        for size in parse_list(sizes):
            num_bytes = parse_bytes(size)
            if num_bytes % DTYPES[dtype].itemsize:
                raise UsageError(
                    f"{num_bytes} bytes are not a whole number of {dtype} elements; give a multiple of "
                    f"{DTYPES[dtype].itemsize} bytes"
                )
            cases.append(Case(num_bytes, dtype))
    if not cases:
        raise UsageError("no sizes or no dtypes were given; give at least one of each")
    return tuple(dict.fromkeys(cases))


def _finish(found: Report, picture: Path | None) -> int:
    report.show(found.rows)
    for note in found.notes:
        _console.write(f"not compared with {note}" if not note.startswith("floors") else note)
    if sys.stdout.isatty() and find_spec("rich") is None:
        _console.write("(install flycomm[bench] for coloured tables and progress)")
    if picture is not None:
        plot.save(found.rows, picture)
        _console.write(f"drawn: {picture}")
    return _code(found)


def _code(found: Report) -> int:
    return 0 if all(row["correct"] for row in found.rows if row["what"] != "floor") else 1


def _names() -> str:
    return ", ".join(baselines.REGISTRY)


def _who() -> str:
    """In the messages of one of several processes."""
    rank = os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
    return "" if rank is None else f", rank {rank}"
