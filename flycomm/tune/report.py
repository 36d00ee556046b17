# SPDX-License-Identifier: Apache-2.0
"""What was found, as tables: a line a size; and the table in force, a line a row."""

from __future__ import annotations

from itertools import groupby

from flycomm import _console
from flycomm.bench.collective import SHARE
from flycomm.bench.units import format_bytes
from flycomm.tables import LOOPING, Row, Table
from flycomm.tune.run import Line, Tuned

_NOTHING = "–"


def show(tuned: Tuned, where: str) -> None:
    """The choices and their times; ``where``: ranks, target and device."""
    for (op, mode), group in groupby(tuned.lines, lambda line: (line.op, line.mode)):
        columns = [SHARE[op], "protocol", "grid", "piece", "µs", "before", "gain"]
        _console.table(f"{op}, {where}, {mode}: µs a call, slowest rank", columns, [_line(one) for one in group])
    for note in tuned.notes:
        _console.write(note)


def show_plan(tuned: Tuned, where: str) -> None:
    """What would be measured."""
    for (op, mode), group in groupby(tuned.planned, lambda one: one[:2]):
        rows = [[format_bytes(size), str(count)] for _, _, size, count in group]
        _console.table(f"{op}, {where}, {mode}: measurements at most", [SHARE[op], "measurements"], rows)
    total = sum(count for *_, count in tuned.planned)
    _console.write(f"{total} measurements at most, for {tuned.path}; nothing was measured (--dry-run)")


def show_table(table: Table, place: str) -> None:
    """All rows of a table; ``place``: where it lies."""
    _console.write(f"dispatch table for {table.arch}, {table.source}: {place}")
    for part in table.how.split(" | "):
        _console.write(f"  {part}")
    _console.write()
    for (op, worlds, mode), group in groupby(table.rows, lambda row: (row.op, row.worlds, row.mode)):
        ranks = f"{worlds[0]} to {worlds[1]} ranks" if worlds[0] < worlds[1] else f"{worlds[0]} ranks"
        title = f"{op}, {ranks}{'' if mode == 'any' else f', {mode}'}"
        _console.table(title, [f"{SHARE[op]} up to", "protocol", "grid", "piece"], [_row(row) for row in group])


def _row(row: Row) -> list[str]:
    largest = "any" if row.largest is None else format_bytes(row.largest)
    return [largest, row.protocol, f"{row.blocks} × {row.threads}", _piece(row.protocol, row.capacity, row.largest)]


def _line(line: Line) -> list[str]:
    one, size = line.choice.candidate, line.choice.num_bytes
    cells = [
        format_bytes(size),
        one.protocol,
        f"{one.blocks} × {one.threads}",
        _piece(one.protocol, one.capacity, size),
    ]
    if line.before_us is None:
        return [*cells, f"{line.choice.us:.2f}", _NOTHING, _NOTHING]
    return [*cells, f"{line.choice.us:.2f}", f"{line.before_us:.2f}", f"{line.before_us / line.choice.us - 1:.0%}"]


def _piece(protocol: str, capacity: int, size: int | None) -> str:
    """What goes at a time, where that is not the whole message."""
    return format_bytes(capacity) if protocol in LOOPING and (size is None or capacity < size) else "whole"
