# SPDX-License-Identifier: Apache-2.0
"""The options of ``python -m flycomm tune``, and what they come to."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Mapping
from pathlib import Path

import flycomm
from flycomm import targets
from flycomm.bench import cases, origin
from flycomm.bench.problem import Case
from flycomm.bench.ranks import Started
from flycomm.bench.subjects import SUBJECTS, mono
from flycomm.bench.units import format_bytes, parse_bytes, parse_list
from flycomm.channel import FRAGMENT_BYTES
from flycomm.errors import UsageError
from flycomm.kernels.mono_ffn import ROWS
from flycomm.tables import OPS
from flycomm.tune.crossings import Indexing, Mono
from flycomm.tune.fusing import OP
from flycomm.tune.work import Settings

NAMES = (*OPS, OP, Mono.op, Indexing.op)
_DEFAULTS: dict[str, dict[str, str]] = {  # where they are not bench's
    OP: {},
    Mono.op: {"rows": ",".join(map(str, ROWS))},
    Indexing.op: {"context": ",".join(str(1 << power) for power in range(14, 21))},
}
_SHAPES = {
    "rows": f"all_reduce_norm: token rows (default 1,4,16); mono_ffn (default {_DEFAULTS[Mono.op]['rows']})",
    "hidden": "all_reduce_norm, mono_ffn: elements of a row (defaults as in bench)",
    "intermediate": "mono_ffn: of the feed-forward layer, on a rank",
    "projection": "mono_ffn: columns of what follows, on a rank",
    "grid": "mono_ffn: blocks and threads a block, as in 128x256, or 128x256/dot",
    "kind": "indexer: dsa, block_max (default both)",
    "context": f"indexer: tokens of a request (default {_DEFAULTS[Indexing.op]['context']})",
    "requests": "indexer: requests of a step",
    "query-rows": "indexer: query rows of a request",
    "format": "indexer: of the cache",
    "heads": "indexer: index heads (default: the kind's)",
    "k": "indexer: keys that a row keeps (default: the kind's)",
}
_FROM, _TO = "2KiB", "64MiB"
_LONGEST_NORM = 16 << 20  # bytes
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
    add("--ops", default=",".join(OPS), metavar="A,B", help=f"of {', '.join(NAMES)} (default {', '.join(OPS)})")
    add("--from", dest="first", metavar="BYTES", help=f"smallest message or shard (default {_FROM})")
    add("--to", dest="last", metavar="BYTES", help=f"largest (default {_TO}); powers of two between")
    for name, meaning in _SHAPES.items():
        add(f"--{name}", metavar="BxT" if name == "grid" else "A,B", help=meaning)
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
    given = {name: getattr(args, name.replace("-", "_")) for name in _SHAPES}
    _check_meant(ops, {"from": args.first, "to": args.last, **given})
    sizes = _sizes(args.first or _FROM, args.last or _TO)
    shapes = {op: _cases(op, given) for op in ops if op in _DEFAULTS}
    if not (math.isfinite(args.limit_seconds) and args.limit_seconds > 0):
        raise UsageError(f"--limit-seconds {args.limit_seconds:g} is not a time; give some seconds, 600 for example")
    if args.world is not None and args.world < 1:
        raise UsageError(f"--world {args.world} is not a number of ranks; give at least 1")
    first, last = (format_bytes(size).replace(" ", "") for size in (sizes[0], sizes[-1]))
    by_bytes = any(op in OPS for op in ops)
    options = ["--target", target.name, "--ops", ",".join(ops)]
    options += ["--from", first, "--to", last] if by_bytes else []
    options += [word for name, value in given.items() if value is not None for word in (f"--{name}", value)]
    options += ["--modes", ",".join(modes), *(["--quick"] if args.quick else [])]
    of_what = [", ".join(ops), " and ".join(modes), *([f"{first} to {last}"] if by_bytes else [])]
    of_what += [f"{name} {value}" for one in shapes.values() for name, value in _words(one).items()]
    device = target.capabilities(0).device_name
    commit = args.commit or origin.commit(Path(flycomm.__file__).resolve().parents[1])

    def how(started: Started) -> tuple[str, str]:
        words = [*started.launcher, "flycomm", "tune"]
        words += ["--world", str(started.world_size)] if started.local else []
        measured = ", ".join([f"{started.world_size} ranks", *dict.fromkeys(of_what)])
        return measured, f"{shlex.join([*words, *options])} on {device}, commit {commit or 'unknown'}"

    return Settings(
        target=target,
        ops=ops,
        sizes=sizes,
        cases=shapes,
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
    if unknown := [op for op in named if op not in NAMES]:
        raise UsageError(f"--ops {unknown[0]} is not one of {', '.join(NAMES)}; use these")
    if not named:
        raise UsageError(f"--ops names nothing; give some of {', '.join(NAMES)}")
    return tuple(sorted(named, key=NAMES.index))  # what is measured later goes by what was found before


def _check_meant(ops: tuple[str, ...], given: Mapping[str, str | None]) -> None:
    """Raise :class:`UsageError` for an option that no operation is sized by."""
    for name, value in given.items():
        sized = list(OPS) if name in ("from", "to") else [op for op in _DEFAULTS if name in SUBJECTS[op].options]
        if value is not None and not set(sized) & set(ops):
            raise UsageError(
                f"--{name} {value} means nothing to --ops {','.join(ops)}; leave it out, or name {' or '.join(sized)}"
            )


def _cases(op: str, given: Mapping[str, str | None]) -> tuple[Case, ...]:
    named = {name: value for name, value in given.items() if name in SUBJECTS[op].options}
    chosen = {name: value for name, value in _DEFAULTS[op].items() if named.get(name) is None}
    found = cases.of(op, {**named, **chosen})
    for case in found:
        _check_case(op, case)
    return found


def _words(shapes: tuple[Case, ...]) -> dict[str, str]:
    return {name: value for name, value in cases.words(shapes).items() if name != "dtype"}


def _check_case(op: str, case: Case) -> None:
    """Raise :class:`UsageError` for what has no kernel, so that nothing could be measured."""
    if op == Mono.op:
        mono.check(case)
    if op == OP and case.num_bytes > _LONGEST_NORM:
        raise UsageError(
            f"{case.rows} rows of {case.hidden} are {case.num_bytes} bytes, over the {_LONGEST_NORM} up to which "
            "fusing is measured; give fewer rows"
        )
    if op == OP and case.num_bytes // (case.rows or 1) % FRAGMENT_BYTES:
        raise UsageError(
            f"--hidden {case.hidden} is not whole {FRAGMENT_BYTES} bytes of {case.dtype}, which the fused kernel reads "
            "at a time; pad it"
        )


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
