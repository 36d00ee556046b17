# SPDX-License-Identifier: Apache-2.0
"""What was found, as tables: a line a size; and the table in force, a line a row."""

from __future__ import annotations

from itertools import groupby

from flycomm import _console
from flycomm.bench.collective import SHARE
from flycomm.bench.units import format_bytes
from flycomm.tables import Row, Table
from flycomm.tune.messages import piece
from flycomm.tune.results import Tuned


def show(tuned: Tuned, where: str) -> None:
    """The choices and their times; ``where``: ranks, target and device."""
    for one in tuned.sections:
        if one.rows:
            title = f"{one.op}, {where}, {one.mode}: µs a call, slowest rank"
            _console.table(title, one.columns, one.rows)
    for note in tuned.notes:
        _console.write(note)


def show_plan(tuned: Tuned, where: str) -> None:
    """What would be measured."""
    for (op, mode), group in groupby(tuned.planned, lambda one: (one.op, one.mode)):
        rows = [[one.size, str(one.count)] for one in group]
        _console.table(f"{op}, {where}, {mode}: measurements at most", [SHARE[op], "measurements"], rows)
    total = sum(one.count for one in tuned.planned)
    _console.write(f"{total} measurements at most, for {tuned.path}; nothing was measured (--dry-run)")


def show_table(table: Table, place: str) -> None:
    """All rows of a table; ``place``: where it lies."""
    _console.write(f"dispatch table for {table.arch}, {table.source}: {place}")
    for part in table.how.split(" | "):
        _console.write(f"  {part}")
    _console.write()
    for (op, worlds, mode), group in groupby(table.rows, lambda row: (row.op, row.worlds, row.mode)):
        title = f"{op}, {_ranks(worlds)}{'' if mode == 'any' else f', {mode}'}"
        _console.table(title, [f"{SHARE[op]} up to", "protocol", "grid", "piece"], [_row(row) for row in group])
    for (kernel, worlds), pays in groupby(table.mono, lambda one: (one.kernel, one.worlds)):
        rows = [[str(one.hidden), str(one.inter), str(one.rows)] for one in pays]
        _console.table(f"{kernel}, {_ranks(worlds)}", ["hidden", "intermediate", "one launch up to rows"], rows)
    for (kind, worlds), lines in groupby(table.indexer, lambda one: (one.kind, one.worlds)):
        rows = [[_or(one.rows, "any"), _or(one.context, "never"), one.source] for one in lines]
        _console.table(f"indexer {kind}, {_ranks(worlds)}", ["rows up to", "shared from tokens", "source"], rows)


def _ranks(worlds: tuple[int, int]) -> str:
    return f"{worlds[0]} to {worlds[1]} ranks" if worlds[0] < worlds[1] else f"{worlds[0]} ranks"


def _or(number: int | None, otherwise: str) -> str:
    return otherwise if number is None else str(number)


def _row(row: Row) -> list[str]:
    largest = "any" if row.largest is None else format_bytes(row.largest)
    return [largest, row.protocol, f"{row.blocks} × {row.threads}", piece(row.protocol, row.capacity, row.largest)]
