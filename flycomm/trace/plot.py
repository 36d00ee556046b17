# SPDX-License-Identifier: Apache-2.0
"""A timeline figure from a trace file: a panel a rank, a line a block, stages as bars, waits as thin ones in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flycomm.errors import UsageError

_LINES = 64  # of blocks, in a panel that can be read
_WAITS = ("wait", "take", "ready.wait")


def load(path: Path) -> dict[str, Any]:
    """A trace file; raises :class:`UsageError` for what is none."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        data = None
    if not isinstance(data, dict) or not {"traceEvents", "otherData"} <= data.keys():
        raise UsageError(f"{path} is not a trace; name a file that comm.trace() wrote")
    return data


def save(data: dict[str, Any], path: Path, channel: str = "", blocks: int = _LINES) -> None:
    """Draw the blocks below ``blocks`` of the channels whose name has ``channel`` in it, into a PNG file (or what else
    its suffix says)."""
    if find_spec("matplotlib") is None:
        raise UsageError("a timeline needs matplotlib, which is not installed; install flycomm[bench]")
    if blocks < 1:
        raise UsageError(f"{blocks} blocks are none to draw; give at least 1")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lines = _lines(data, channel, blocks)
    slices = [event for event in data["traceEvents"] if event["ph"] == "X" and (event["pid"], event["tid"]) in lines]
    if not slices:
        raise UsageError(f"the trace has no slices of a channel with {channel!r} in its name; name another")
    names = list(dict.fromkeys(event["name"] for event in slices if event["name"] not in ("call", *_WAITS)))
    colors = {name: f"C{i % 10}" for i, name in enumerate(names)} | {"call": "0.9"} | dict.fromkeys(_WAITS, "0.3")
    ranks = sorted({rank for rank, _ in lines})
    tall = sum(1.2 + 0.18 * sum(rank == one for one, _ in lines) for rank in ranks)
    figure = Figure(figsize=(10, tall), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, rank in zip(figure.subplots(len(ranks), squeeze=False, sharex=True)[:, 0], ranks, strict=True):
        mine = [line for line in lines if line[0] == rank]
        for event in slices:
            if event["pid"] == rank:
                height = 0.4 if event["name"] in _WAITS else 0.8
                place = mine.index((rank, event["tid"])) - height / 2
                color = colors[event["name"]]
                axes.broken_barh([(event["ts"], event["dur"])], (place, height), facecolors=color, linewidth=0)
        axes.set_yticks(range(len(mine)), [lines[line] for line in mine], fontsize=6)
        axes.invert_yaxis()
        axes.set_title(f"rank {rank}", fontsize=9)
    axes.set_xlabel("µs")
    waits = ", ".join(name for name in _WAITS if any(event["name"] == name for event in slices))
    keys = [Patch(color=colors[name], label=name) for name in names]
    keys += [Patch(color=colors[_WAITS[0]], label=waits)] if waits else []
    figure.legend(handles=keys, loc="outside upper right", ncols=6, fontsize=8)
    figure.suptitle(_about(data["otherData"]), fontsize=9, x=0.01, ha="left")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # a ValueError: of a suffix that matplotlib does not know
        raise UsageError(f"{path} cannot be drawn ({error}); name a .png file that can be written") from None


def _lines(data: dict[str, Any], channel: str, blocks: int) -> dict[tuple[int, int], str]:
    """(rank, thread) → name, of what is to be drawn."""
    named = [event for event in data["traceEvents"] if event["name"] == "thread_name"]
    found = {(event["pid"], event["tid"]): event["args"]["name"] for event in named}
    return {
        line: name
        for line, name in found.items()
        if channel in name and int(name.rpartition(" ")[2]) < min(blocks, _LINES)
    }


def _about(told: dict[str, Any]) -> str:
    uncertain: Sequence[float] = [one["uncertain_us"] for one in told["clocks"]]
    dropped = f", {sum(told['dropped'])} records dropped" if any(told["dropped"]) else ""
    return f"{told['target']} ({told['arch']}), clocks aligned to ±{max(uncertain):.2g} µs{dropped}"
