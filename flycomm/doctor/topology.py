# SPDX-License-Identifier: Apache-2.0
"""How the GPUs of this machine are linked, in the words of the drivers' own tools."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

TOOLS = (("rocm-smi", "--showtopo"), ("amd-smi", "topology"), ("nvidia-smi", "topo", "-m"))
_SECONDS = 20  # that a tool may take: one hangs where its driver does
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU\d+|[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d")  # a number, or where it is on the bus
_LINK = re.compile(r"XGMI|NV\d+|PCIE|PIX|PXB|PHB|NODE|SYS")


def topology() -> list[dict[str, Any]]:
    """What each tool of :data:`TOOLS` that is installed says: ``command``, ``output``, ``problem`` (empty if it ended
    well), and ``links``: what is read in it, ``{"names": […], "kinds": [[…]]}``, or None."""
    return [_ask(tool) for tool in TOOLS if shutil.which(tool[0])]


def _ask(tool: tuple[str, ...]) -> dict[str, Any]:
    try:
        done = subprocess.run(tool, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"command": " ".join(tool), "output": "", "problem": str(error), "links": None}
    output = _COLOURS.sub("", done.stdout)
    problem = f"exit code {done.returncode}: {done.stderr.strip()}" if done.returncode else ""
    return {"command": " ".join(tool), "output": output, "problem": problem, "links": links_of(output)}


def links_of(output: str) -> dict[str, Any] | None:
    """The first table of GPUs by GPUs with a kind of link in it (XGMI, NV18, PCIE, …); None if there is none."""
    lines = [line.split() for line in output.splitlines()]
    for number, words in enumerate(lines):
        names = _leading_gpus(words)
        rows = lines[number + 1 : number + 1 + len(names)]
        if not names or [row[:1] for row in rows] != [[name] for name in names]:
            continue
        kinds = [row[1 : 1 + len(names)] for row in rows]
        if all(len(row) == len(names) for row in kinds) and any(_LINK.fullmatch(kind) for row in kinds for kind in row):
            return {"names": names, "kinds": kinds}
    return None


def _leading_gpus(words: list[str]) -> list[str]:
    names: list[str] = []
    for word in words:
        if not _GPU.fullmatch(word):
            break
        names.append(word)
    return names
