# SPDX-License-Identifier: Apache-2.0
"""Results as JSON lines, one a (case, baseline), and where they come from.

Keys: ``what`` ("all_reduce", or "floor"), ``target``, ``device``, ``world``, ``bytes`` (of the message), ``dtype``,
``protocol`` ("fallback" where flycomm handed over), ``mode``, ``replay_on`` (the stream of replays: "own" or
"default"), ``us`` (median, slowest rank), ``skew_us``, ``baseline``, ``baseline_us``, ``ratio`` (``baseline_us / us``),
``correct`` (of flycomm, to the bit), ``max_error``, ``commit``, ``command``. What is not known is null. In a floor
``protocol`` is its name: "empty", "flag", "copy" or "one_shot".
"""

from __future__ import annotations

import json
import math
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flycomm.bench.floors import Floor
from flycomm.bench.harness import Case, Outcome
from flycomm.errors import UsageError

Row = dict[str, Any]

KEYS = (
    "what",
    "target",
    "device",
    "world",
    "bytes",
    "dtype",
    "protocol",
    "mode",
    "replay_on",
    "us",
    "skew_us",
    "baseline",
    "baseline_us",
    "ratio",
    "correct",
    "max_error",
    "commit",
    "command",
)


def of_case(
    common: Mapping[str, Any], case: Case, protocol: str, outcome: Outcome, baselines: Mapping[str, Outcome | None]
) -> list[Row]:
    """The rows of one case: one a baseline (None: it has no time), or one without a baseline.

    ``common`` has what all rows of a run share: what, target, device, world, mode, commit, command.
    """
    measured = {
        "bytes": case.num_bytes,
        "dtype": case.dtype,
        "protocol": protocol,
        "us": _rounded(outcome.us),
        "skew_us": _rounded(outcome.skew_us),
        "correct": outcome.correct,
        "max_error": outcome.max_error if math.isfinite(outcome.max_error) else None,
    }
    compared: Sequence[tuple[str | None, Outcome | None]] = list(baselines.items()) or [(None, None)]
    rows = []
    for name, other in compared:
        baseline_us = _rounded(other.us) if other is not None else None
        ratio = round(baseline_us / outcome.us, 3) if baseline_us is not None and outcome.us else None
        rows.append(_row(common, measured | {"baseline": name, "baseline_us": baseline_us, "ratio": ratio}))
    return rows


def of_floor(common: Mapping[str, Any], floor: Floor) -> Row:
    found = {"what": "floor", "protocol": floor.name, "bytes": floor.num_bytes, "us": _rounded(floor.us)}
    return _row(common, found)


def _row(common: Mapping[str, Any], found: Mapping[str, Any]) -> Row:
    merged = {**common, **found}
    return {key: merged.get(key) for key in KEYS}


def _rounded(us: float | None) -> float | None:
    return None if us is None else round(us, 3)


def append(path: Path, rows: Sequence[Row]) -> None:
    """Add lines to a results file; its folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def load(path: Path) -> list[Row]:
    """The rows of a results file. Raises :class:`UsageError` naming the line that is none."""
    rows = []
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); pass a file that --json wrote") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not set(KEYS) <= row.keys():
            raise UsageError(f"line {number} of {path} is not a result row; pass a file that --json wrote")
        rows.append(row)
    return rows


def commit(root: Path) -> str | None:
    """The short hash of the checkout whose top folder is ``root``, with "+dirty" where its code differs from that.

    None if there is no such checkout, or no git.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return None
    short = _git(root, "rev-parse", "--short", "HEAD")
    if short is None:
        return None
    changed = _git(root, "status", "--porcelain", "--", "flycomm", "csrc_shim")
    return f"{short}+dirty" if changed else short


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def command(launcher: Sequence[str], options: Mapping[str, Any]) -> str:
    """A command line that measures the same again: all that was in force, without where results were written."""
    words = [*launcher, "flycomm", "bench", "all_reduce"]
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", str(value)]
    return shlex.join(words)
