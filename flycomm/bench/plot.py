# SPDX-License-Identifier: Apache-2.0
"""Latency over message size, from rows: of this run, or of a results file on a machine with no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from flycomm.bench import labels
from flycomm.bench.collective import SHARE
from flycomm.bench.rows import Row
from flycomm.bench.units import format_bytes
from flycomm.errors import UsageError

Points = dict[int, float]  # message bytes to microseconds

_OURS = "flycomm"
_LEVEL_LABELS = 10  # sizes whose names fit side by side
_FLOOR = "floor (launch + link + bytes)"


def require_matplotlib() -> None:
    """Before anything is measured: is there something to draw with?"""
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed; install flycomm[bench], or leave it out")


def lines(rows: Sequence[Row]) -> dict[str, Points]:
    """What one panel draws: flycomm first, then every baseline that has a time, then the floor. Later rows replace
    earlier ones."""
    drawn: dict[str, Points] = {_OURS: {}}
    cases = [row for row in rows if row["what"] != "floor"]
    for row in cases:
        if row["us"] is not None:
            drawn[_OURS][row["bytes"]] = row["us"]
        if row["baseline"] is not None and row["baseline_us"] is not None:
            drawn.setdefault(row["baseline"], {})[row["bytes"]] = row["baseline_us"]
    if cases:
        drawn[_FLOOR] = labels.floors_for(cases[0], rows)
    return {name: dict(sorted(points.items())) for name, points in drawn.items() if points}


def save(rows: Sequence[Row], path: Path) -> None:
    """Draw one panel a (collective, dtype, machine, way of timing) into a PNG file (or what else its suffix says)."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    panels = _panels(rows)
    if not panels:
        raise UsageError("there is no timed result to draw; measure some first, or pass another file with --from")
    figure = Figure(figsize=(8, 5 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, group) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        drawn = lines(group)
        for name, points in drawn.items():
            axes.plot(list(points), list(points.values()), label=name, **_style(name))
        sizes = sorted({size for points in drawn.values() for size in points})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(FixedLocator(sizes))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(round(size))))
        axes.xaxis.set_minor_locator(NullLocator())
        if len(sizes) > _LEVEL_LABELS:
            axes.tick_params(axis="x", rotation=45)
        axes.yaxis.set_major_locator(FixedLocator(_ticks([us for points in drawn.values() for us in points.values()])))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda us, _: f"{us:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(f"{SHARE[group[0]['what']]} (bytes a rank)")
        axes.set_ylabel("latency (µs, slowest rank)")
        axes.set_title(title)
        axes.grid(True, alpha=0.3)
        axes.legend()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # a ValueError: of a suffix that matplotlib does not know
        raise UsageError(f"{path} cannot be drawn ({error}); name a .png file that can be written") from None


def _panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Titles to rows. Floors have no dtype: they belong to every panel of their run."""
    panels: dict[str, list[Row]] = {}
    for row in rows:
        if row["what"] != "floor" and row["us"] is not None:
            where = f"{labels.ranks(row)}, {row['target']} ({row['device']})"
            title = f"{labels.collective(row)}, {row['dtype']}{labels.series(row)}, {labels.how(row)}: {where}"
            panels.setdefault(title, []).append(row)
    floors = [row for row in rows if row["what"] == "floor"]
    return {title: group + floors for title, group in panels.items()}


def _ticks(values: Sequence[float]) -> list[float]:
    """1, 1.5, 2, 3, 5, 7 times the powers of ten, as far as the values reach; few enough to be read."""
    low, high = min(values), max(values)
    steps = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if high < 30 * low else (1.0, 3.0)
    return [tick for power in range(-3, 9) for step in steps if low / 1.5 <= (tick := step * 10.0**power) <= high * 1.5]


def _style(name: str) -> dict[str, object]:
    if name == _OURS:
        return {"color": "black", "linewidth": 2.5, "marker": "o"}
    if name == _FLOOR:
        return {"color": "gray", "linewidth": 1.5, "linestyle": ":"}
    return {"linewidth": 1.5, "marker": "."}
