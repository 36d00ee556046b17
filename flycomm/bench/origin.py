# SPDX-License-Identifier: Apache-2.0
"""Where rows come from: the commit that was measured, and the command that measures it again."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


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


def command(launcher: Sequence[str], what: str, options: Mapping[str, Any]) -> str:
    """A command line that measures the same again: all that was in force, without where results were written."""
    words = [*launcher, "flycomm", "bench", what]
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", str(value)]
    return shlex.join(words)
