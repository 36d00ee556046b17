# SPDX-License-Identifier: Apache-2.0
"""The options of ``python -m flycomm bench``, and what they come to."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import flycomm
from flycomm import targets
from flycomm.bench import baselines, cases, origin
from flycomm.bench.collective import Collective
from flycomm.bench.harness import Method
from flycomm.bench.problem import BUFFERS
from flycomm.bench.settings import Settings
from flycomm.bench.subjects import SUBJECTS
from flycomm.bench.units import parse_list
from flycomm.dtypes import REDUCTIONS
from flycomm.errors import UsageError

NAMES = tuple(SUBJECTS)
_DEFAULTS = {"graph": (50, 100), "eager": (20, 20)}  # mode: calls a replay or sample, repeats
_LONGEST_DELAY_US = 100_000.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bench``."""
    add = parser.add_argument
    add("what", choices=NAMES, help="what is measured")
    add(
        "--world",
        type=int,
        metavar="N",
        help="virtual ranks of this process (default 2, of topk 1; not under torchrun or mpirun)",
    )
    add("--target", choices=targets.NAMES, help="default: FLYCOMM_TARGET, else the first that can run")
    cases.add_arguments(parser)
    add("--reduction", metavar="R", help=f"{', '.join(REDUCTIONS)} (default sum), of all_reduce and reduce_scatter")
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
    add("--skew-us", type=float, default=0.0, metavar="US", help="one rank, in turn, comes this late to each call")
    add(
        "--floors",
        action=argparse.BooleanOptionalAction,
        help="measure what no kernel can beat (default: on a GPU, with no --skew-us; of a top-k there are none)",
    )
    add("--table", metavar="FILE", help="the dispatch table of flycomm's calls (default: the one in force), or shipped")
    add("--fallback", choices=("group", "error"), default="group", help="what flycomm does with a call it cannot do")
    add("--timeout", type=float, metavar="S", help="seconds that a wait in a kernel may last (default FLYCOMM_TIMEOUT)")
    add("--commit", metavar="TEXT", help="what the rows say of the code measured (default: git is asked)")
    add("--json", type=Path, metavar="FILE", help="append the results to a file, a JSON object a line")
    add("--plot", type=Path, metavar="FILE", help="draw latency over size (png, svg, pdf)")
    add("--compare", type=Path, metavar="FILE", help="set the times beside those of a file that --json wrote")
    add("--from", dest="source", type=Path, metavar="FILE", help="measure nothing: show results that --json wrote")


def settings(args: argparse.Namespace) -> Settings:
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
    wanted = cases.parse(args)
    if not 0 <= args.skew_us <= _LONGEST_DELAY_US:
        raise UsageError(
            f"--skew-us {args.skew_us:g} is not in 0..{_LONGEST_DELAY_US:g} microseconds; give one that a call can wait"
        )
    what = Collective.of(args.what, args.reduction)
    bounded = SUBJECTS[what.name].grid is not None
    if args.floors and not bounded:
        raise UsageError(f"--floors are of messages, and {what.name} has no message to bound it; leave it out")
    floors = graphs and bounded and not args.skew_us if args.floors is None else args.floors
    against = parse_list(args.against)
    names = baselines.wanted(against)
    command: dict[str, Any] = {
        "target": target.name,
        **cases.words(wanted),
        "mode": mode,
        "against": ",".join(against),
        "calls": calls,
        "repeats": repeats,
        "fallback": args.fallback,
        "floors": floors,
        "replay-on": args.replay_on,
    }
    if what.reduction is not None:
        command["reduction"] = what.reduction
    if args.table is not None:
        command["table"] = args.table
    if args.skew_us:
        command["skew-us"] = f"{args.skew_us:g}"
    return Settings(
        target=target,
        collective=what,
        cases=wanted,
        method=Method(mode, calls, repeats, args.skew_us),
        against=tuple(names),
        explicit=against == names,
        floors=floors,
        timeout=args.timeout,
        table=args.table,
        fallback=args.fallback,
        replay_on=args.replay_on,
        commit=args.commit or origin.commit(Path(flycomm.__file__).resolve().parents[1]),
        command=command,
        json=args.json,
    )


def _names() -> str:
    return ", ".join(baselines.REGISTRY)
