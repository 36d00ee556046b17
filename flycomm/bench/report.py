# SPDX-License-Identifier: Apache-2.0
"""Rows as tables: a line a case, a column a baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flycomm import _console
from flycomm.bench import labels
from flycomm.bench.collective import SHARE
from flycomm.bench.rows import Row
from flycomm.bench.units import format_bytes, unique

_NOTHING = "–"


def show(rows: Sequence[Row]) -> None:
    """Write the tables to standard output."""
    for title, columns, lines in tables(rows):
        _console.table(title, columns, lines)


def tables(rows: Sequence[Row]) -> list[tuple[str, list[str], list[list[str]]]]:
    """``(title, columns, lines)`` of each collective, world and way of timing in the rows, then of the floors."""
    groups: dict[str, list[Row]] = {}
    floors: dict[str, list[Row]] = {}
    for row in rows:
        where = f"{labels.ranks(row)} on {row['target']} ({row['device']})"
        if row["what"] == "floor":
            floors.setdefault(f"floors, {where}, {row['mode']}", []).append(row)
        else:
            title = f"{labels.collective(row)}, {where}, {labels.how(row)}: µs a call, slowest rank"
            groups.setdefault(title, []).append(row)
    drawn = [(title, *_of_cases(group, labels.floors_for(group[0], rows))) for title, group in groups.items()]
    return drawn + [(title, *_of_floors(group)) for title, group in floors.items()]


def _of_cases(cases: Sequence[Row], bounds: Mapping[int, float]) -> tuple[list[str], list[list[str]]]:
    baselines = unique(row["baseline"] for row in cases if row["baseline"] is not None)
    enqueued = any(row["enqueue_us"] is not None for row in cases)
    rated = any(row["rate_gb_s"] is not None for row in cases)
    columns = [SHARE[cases[0]["what"]], "dtype", "protocol", "result", "flycomm", "skew"]
    columns += [
        *(["enqueue"] if enqueued else []),
        *(["GB/s"] if rated else []),
        *baselines,
        *(["floor"] if bounds else []),
    ]
    by_case: dict[tuple[int, str, str], list[Row]] = {}
    for row in cases:
        by_case.setdefault((row["bytes"], labels.size(row), row["dtype"]), []).append(row)
    lines = []
    for (num_bytes, size, dtype), group in by_case.items():
        last = group[-1]  # a file may hold several runs: the newest counts
        compared = {row["baseline"]: row for row in group}
        line = [size, dtype, last["protocol"], "ok" if last["correct"] else "WRONG"]
        line += [_us(last["us"]), _us(last["skew_us"]), *([_us(last["enqueue_us"])] if enqueued else [])]
        line += [_us(last["rate_gb_s"])] if rated else []
        line += [_compared(compared.get(name)) for name in baselines]
        lines.append(line + ([_us(bounds.get(num_bytes))] if bounds else []))
    return columns, lines


def _of_floors(floors: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    meaning = {
        "empty": "a launch of the same grid that does nothing",
        "flag": "one way of a flag between two ranks",
        "copy": "every rank copies to its neighbour",
        "one_shot": "launch + flag + bytes to every peer at the copy's rate",
        "two_shot": "launch + 2 flags + 2 / world of the bytes to every peer",
    }
    lines = []
    for row in floors:
        rate = f"{row['bytes'] / row['us'] / 1000:.0f} GB/s" if row["protocol"] == "copy" and row["us"] else ""
        size = format_bytes(row["bytes"]) if row["bytes"] else _NOTHING
        lines.append([row["protocol"], size, _us(row["us"]), rate, meaning.get(row["protocol"], "")])
    return ["floor", "bytes", "µs", "rate", "what it is"], lines


def _us(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.2f}"


def _compared(row: Row | None) -> str:
    if row is None or row["baseline_us"] is None:
        return _NOTHING
    ratio = f" ({row['ratio']:.2f}×)" if row["ratio"] is not None else ""
    enqueue_us = row["baseline_enqueue_us"]
    return _us(row["baseline_us"]) + ratio + (f", enqueue {_us(enqueue_us)}" if enqueue_us is not None else "")
