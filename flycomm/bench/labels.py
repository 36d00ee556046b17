# SPDX-License-Identifier: Apache-2.0
"""What rows are of, in words: titles of tables and of plots, and what belongs under one."""

from __future__ import annotations

from collections.abc import Sequence

from flycomm.bench.rows import Row


def collective(row: Row) -> str:
    """``"all_reduce"``, or with the reduction where that is not the usual one."""
    return row["what"] if row["reduction"] in (None, "sum") else f"{row['what']} {row['reduction']}"


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
