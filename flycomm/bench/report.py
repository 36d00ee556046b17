# SPDX-License-Identifier: Apache-2.0
"""Rows as tables: a line a case, a column a baseline."""

from __future__ import annotations

from collections.abc import Sequence

from flycomm import _console
from flycomm.bench.rows import Row
from flycomm.bench.units import format_bytes, unique

_NOTHING = "–"


def show(rows: Sequence[Row]) -> None:
    """Write the tables to standard output."""
    for title, columns, lines in tables(rows):
        _console.table(title, columns, lines)


def tables(rows: Sequence[Row]) -> list[tuple[str, list[str], list[list[str]]]]:
    """``(title, columns, lines)`` of each (target, device, world, mode) in the rows, then of the floors."""
    groups: dict[tuple[str, str, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["target"], row["device"], row["world"], row["mode"]), []).append(row)
    drawn = []
    for (target, device, world, mode), group in groups.items():
        where = f"{world} rank{'s' if world > 1 else ''} on {target} ({device}), {mode}"
        cases = [row for row in group if row["what"] != "floor"]
        floors = [row for row in group if row["what"] == "floor"]
        if cases:
            drawn.append((f"{cases[0]['what']}, {where}: µs a call, slowest rank", *_of_cases(cases, floors)))
        if floors:
            drawn.append((f"floors, {where}", *_of_floors(floors)))
    return drawn


def _of_cases(cases: Sequence[Row], floors: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    baselines = unique(row["baseline"] for row in cases if row["baseline"] is not None)
    bounds = {row["bytes"]: row["us"] for row in floors if row["protocol"] == "one_shot"}
    columns = ["message", "dtype", "protocol", "result", "flycomm", "skew", *baselines, *(["floor"] if bounds else [])]
    by_case: dict[tuple[int, str], list[Row]] = {}
    for row in cases:
        by_case.setdefault((row["bytes"], row["dtype"]), []).append(row)
    lines = []
    for (num_bytes, dtype), group in by_case.items():
        last = group[-1]  # a file may hold several runs: the newest counts
        compared = {row["baseline"]: row for row in group}
        line = [format_bytes(num_bytes), dtype, last["protocol"], "ok" if last["correct"] else "WRONG"]
        line += [_us(last["us"]), _us(last["skew_us"])]
        line += [_compared(compared.get(name)) for name in baselines]
        lines.append(line + ([_us(bounds.get(num_bytes))] if bounds else []))
    return columns, lines


def _of_floors(floors: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    meaning = {
        "empty": "a launch of the same grid that does nothing",
        "flag": "one way of a flag between two ranks",
        "copy": "every rank copies to its neighbour",
        "one_shot": "launch + flag + bytes to every peer at the copy's rate",
    }
    lines = []
    for row in floors:
        rate = f"{row['bytes'] / row['us'] / 1000:.0f} GB/s" if row["protocol"] == "copy" and row["us"] else ""
        size = format_bytes(row["bytes"]) if row["bytes"] else _NOTHING
        lines.append([row["protocol"], size, _us(row["us"]), rate, meaning.get(row["protocol"], "")])
    return ["floor", "message", "µs", "rate", "what it is"], lines


def _us(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.2f}"


def _compared(row: Row | None) -> str:
    if row is None or row["baseline_us"] is None:
        return _NOTHING
    return _us(row["baseline_us"]) + (f" ({row['ratio']:.2f}×)" if row["ratio"] is not None else "")
