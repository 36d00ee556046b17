# SPDX-License-Identifier: Apache-2.0
"""The options of ``python -m flycomm tune``, and what they come to."""

from __future__ import annotations

import argparse
import math
import shlex
from pathlib import Path

import flycomm
from flycomm import targets
from flycomm.bench import origin
from flycomm.bench.ranks import Started
from flycomm.bench.units import format_bytes, parse_bytes, parse_list
from flycomm.channel import FRAGMENT_BYTES
from flycomm.errors import UsageError
from flycomm.tables import OPS
from flycomm.tune.run import Settings

_MODES = ("graph", "eager")  # what is measured later profits from what was before
_LARGEST = 1 << 30  # bytes
_LIMIT_S = 600.0
_SAMPLES = {True: (20, 8), False: (48, 20)}  # quick or not: calls of a sample at most, repeats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``tune``."""
    add = parser.add_argument
    add(
        "--world", type=int, metavar="N", help="virtual ranks of this process (default 2; not under torchrun or mpirun)"
    )
    add("--target", choices=targets.NAMES, help="default: FLYCOMM_TARGET, else the first that can run")
    add("--ops", default=",".join(OPS), metavar="A,B", help=f"of {', '.join(OPS)} (default all)")
    add("--from", dest="first", default="2KiB", metavar="BYTES", help="smallest message or shard (default 2KiB)")
    add("--to", dest="last", default="64MiB", metavar="BYTES", help="largest (default 64MiB); powers of two between")
    add("--modes", metavar="A,B", help="graph, eager (default: both; eager where the target has no graphs)")
    add("--quick", action="store_true", help="fewer grids and repeats")
    add(
        "--limit-seconds",
        type=float,
        default=_LIMIT_S,
        metavar="S",
        help=f"stop measuring then, and use what is known (default {_LIMIT_S:g})",
    )
    add("--timeout", type=float, metavar="S", help="seconds that a wait in a kernel may last (default FLYCOMM_TIMEOUT)")
    add("--commit", metavar="TEXT", help="what the table says of the code measured (default: git is asked)")
    add("--dry-run", action="store_true", help="measure nothing: say how much would be, and where the table would go")
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the table there, into what it has of other worlds (default: where init looks for it)",
    )
    add("--show", action="store_true", help="measure nothing: print the table in force")


def settings(args: argparse.Namespace) -> Settings:
    """Arguments, checked: everything that can be refused before a rank is started."""
    target = targets.pick(args.target)
    targets.activate(target)
    ops, modes = _ops(args.ops), _modes(args.modes, target)
    sizes = _sizes(args.first, args.last)
    if not (math.isfinite(args.limit_seconds) and args.limit_seconds > 0):
        raise UsageError(f"--limit-seconds {args.limit_seconds:g} is not a time; give some seconds, 600 for example")
    if args.world is not None and args.world < 1:
        raise UsageError(f"--world {args.world} is not a number of ranks; give at least 1")
    first, last = (format_bytes(size).replace(" ", "") for size in (sizes[0], sizes[-1]))
    options = ["--target", target.name, "--ops", ",".join(ops), "--from", first, "--to", last]
    options += ["--modes", ",".join(modes), *(["--quick"] if args.quick else [])]
    device = target.capabilities(0).device_name
    commit = args.commit or origin.commit(Path(flycomm.__file__).resolve().parents[1])

    def how(started: Started) -> tuple[str, str]:
        words = [*started.launcher, "flycomm", "tune"]
        words += ["--world", str(started.world_size)] if started.local else []
        measured = f"{started.world_size} ranks, {', '.join(ops)}, {' and '.join(modes)}, {first} to {last}"
        return measured, f"{shlex.join([*words, *options])} on {device}, commit {commit or 'unknown'}"

    return Settings(
        target=target,
        ops=ops,
        sizes=sizes,
        modes=modes,
        quick=args.quick,
        limit_s=args.limit_seconds,
        samples=_SAMPLES[args.quick],
        timeout=args.timeout,
        out=args.out,
        dry=args.dry_run,
        how=how,
    )


def _ops(text: str) -> tuple[str, ...]:
    named = parse_list(text)
    if unknown := [op for op in named if op not in OPS]:
        raise UsageError(f"--ops {unknown[0]} is not one of {', '.join(OPS)}; use these")
    if not named:
        raise UsageError(f"--ops names nothing; give some of {', '.join(OPS)}")
    return tuple(named)


def _modes(text: str | None, target: targets.Target) -> tuple[str, ...]:
    graphs = target.capabilities(0).graphs
    named = parse_list(text) if text is not None else [mode for mode in _MODES if graphs or mode == "eager"]
    if unknown := [mode for mode in named if mode not in _MODES]:
        raise UsageError(f"--modes {unknown[0]} is not one of {', '.join(_MODES)}; use these")
    if not named:
        raise UsageError(f"--modes names nothing; give some of {', '.join(_MODES)}")
    if "graph" in named and not graphs:
        raise UsageError(
            f"mode graph needs launches that can be captured, which target {target.name} has not; use eager"
        )
    return tuple(mode for mode in _MODES if mode in named)


def _sizes(first: str, last: str) -> tuple[int, ...]:
    ends = {"--from": parse_bytes(first), "--to": parse_bytes(last)}
    for name, size in ends.items():
        if size & (size - 1) or not FRAGMENT_BYTES <= size <= _LARGEST:
            raise UsageError(
                f"{name} {size} bytes is not a power of two from {FRAGMENT_BYTES} B to 1GiB; give for example 64KiB"
            )
    low, high = ends.values()
    if low > high:
        raise UsageError(f"--from {first} is over --to {last}; give the smaller size first")
    return tuple(1 << power for power in range(low.bit_length() - 1, high.bit_length()))
