# SPDX-License-Identifier: Apache-2.0
"""What rows are of, in words: titles of tables and of plots, and what belongs under one."""

from __future__ import annotations

from collections.abc import Sequence

from flycomm.bench.rows import Row
from flycomm.bench.units import format_bytes


def collective(row: Row) -> str:
    """``"all_reduce"``, or with the reduction where that is not the usual one, or an exchange's mode, how, of what."""
    kind = row["exchange_mode"] if row["reduction"] in (None, "sum") else row["reduction"]
    return " ".join(word for word in (row["what"], kind, row["algo"], row["given"]) if word)


def size(row: Row) -> str:
    """``"8 KiB"``, ``"4 × 7168"``, or ``"4 × 65536, k 2048"`` …; empty where nothing has a size."""
    if row["kind"] is not None:
        return f"{_indexer(row)}, {row['context']} tokens"
    if row["rows"] is None:
        return format_bytes(row["bytes"]) if row["bytes"] else ""
    width = row["columns"] if row["hidden"] is None else row["hidden"]
    more = [
        f"{name} {row[key]}"
        for name, key in (("k", "k"), ("intermediate", "intermediate"), ("projection", "projection"))
        if row[key]
    ]
    return ", ".join([f"{row['rows']} × {width}", *more, *([row["grid"]] if row["grid"] else [])])


def series(row: Row) -> str:
    """What the sizes of one line of a plot have in common beside the dtype: of rows the other measures."""
    if row["kind"] is not None:
        return f", {_indexer(row)}"
    if row["hidden"] is not None:
        inner = "".join(f", {key} {row[key]}" for key in ("k", "intermediate", "projection") if row[key])
        return f", hidden {row['hidden']}{inner}"
    return f", {row['rows']} rows, k {row['k']}" if row["rows"] is not None else ""


def _indexer(row: Row) -> str:
    """``"dsa, 4 × 4 rows"``, and what else is not the kind's own: requests × query rows of each."""
    more = [f"{name} {row[name]}" for name in ("heads", "k") if row[name] is not None]
    return ", ".join([row["kind"], f"{row['requests']} × {row['query_rows']} rows", *more])


def how(row: Row) -> str:
    """The way of timing."""
    late = f", one rank {row['straggler_us']:g} µs late" if row["straggler_us"] else ""
    return ("graph on torch's default stream" if row["replay_on"] == "default" else row["mode"]) + late


def ranks(row: Row) -> str:
    return f"{row['world']} rank{'s' if row['world'] > 1 else ''}"


def floors_for(row: Row, rows: Sequence[Row]) -> dict[int, float]:
    """Bytes to the lowest floor that ``rows`` have for a case like ``row``; none where a rank is late on purpose."""
    lowest: dict[int, float] = {}
    for floor in [] if row["straggler_us"] else rows:
        if floor["what"] != "floor" or any(floor[key] != row[key] for key in ("target", "device", "world", "mode")):
            continue
        if floor["protocol"] == "one_shot" or (floor["protocol"] == "two_shot" and row["what"] == "all_reduce"):
            known = lowest.get(floor["bytes"])
            lowest[floor["bytes"]] = floor["us"] if known is None else min(known, floor["us"])
    return lowest
