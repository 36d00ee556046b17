# SPDX-License-Identifier: Apache-2.0
"""Rows into a table. What was not measured stays: other operations, worlds, modes, and sizes outside those measured.

The smallest size measured takes all that is shorter where it is at most a staging slot's least, and the largest all
that is longer where messages of its size fill the link: there sizes are alike. Rows of a fused operation say
themselves of which sizes they take the place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from flycomm.channel import MAX_WORLD
from flycomm.geometry import SMALLEST_CLASS
from flycomm.tables import FUSED, LOOPING, OPS, Pays, Row, Table, parse
from flycomm.tables.crossovers import Crossover
from flycomm.tune.choice import Choice, collapsed, rows_of

FILLS_THE_LINK = 16 << 20  # bytes
_BETWEEN = " | "  # the commands that made a table


@dataclass(frozen=True)
class Fusing:
    """The rows of a fused operation for messages over ``below`` bytes and up to ``above`` (None: for all that is
    longer, too: where there is no row, nothing is fused)."""

    rows: tuple[Row, ...]
    below: int
    above: int | None


Found = Mapping[tuple[str, bool], Sequence[Choice] | Fusing]  # (op, captured) → choices, the smallest size first


def merged(
    base: Table,
    arch: str,
    world: int,
    found: Found,
    graphs: bool,
    how: tuple[str, str],
    mono: Sequence[Pays] = (),
    indexer: Sequence[Crossover] = (),
) -> Table:
    """``base`` with what was found for ``world`` ranks in it, as a measured table of ``arch``.

    ``graphs``: whether calls can be captured; where they cannot, what was found is for any mode. ``how``: what was
    measured, and by what; it takes the place of what ``base`` says of the same. ``mono`` and ``indexer``: lines of
    ``world`` ranks alone.
    """
    rows: list[Row] = []
    for op in (*OPS, *FUSED):
        lanes = [_lanes(base, op, ranks) for ranks in range(1, MAX_WORLD + 1)]
        for captured in (False, True):
            one = found.get((op, captured if graphs else False))
            if isinstance(one, Fusing):
                lanes[world - 1][captured] = spliced_fused(lanes[world - 1][captured], one)
            elif one:
                lanes[world - 1][captured] = spliced(lanes[world - 1][captured], op, one)
        rows += _regrouped(lanes)
    told = [part for part in base.how.split(_BETWEEN) if not part.startswith(f"{how[0]}: ")]
    table = Table(
        arch,
        "measured",
        _BETWEEN.join([f"{how[0]}: {how[1]}", *told]),
        tuple(rows),
        mono=merged_mono(base.mono, mono),
        indexer=merged_indexer(base.indexer, indexer),
    )
    return parse(table.to_json(), "the tuned table")


def spliced(old: Sequence[Row], op: str, choices: Sequence[Choice]) -> list[Row]:
    """The rows of ``old`` for sizes below and above those of ``choices``, and between them the choices'."""
    first, last = choices[0].num_bytes, choices[-1].num_bytes
    below = [] if first <= SMALLEST_CLASS else _clipped(old, first // 2)
    above = [row for row in old if row.largest is None or row.largest > last]
    measured = rows_of(op, old[0].worlds, choices)
    if last >= FILLS_THE_LINK and len(above) == 1 and measured[-1].protocol in LOOPING:
        above = [replace(measured.pop(), largest=None)]
    return collapsed([*below, *measured, *above])


def spliced_fused(old: Sequence[Row], new: Fusing) -> list[Row]:
    """The rows of ``old`` for shorter and longer messages than those of ``new``, whose rows are between them."""
    sizes = [(row, row.largest or 0) for row in old]
    below = [replace(row, largest=min(largest, new.below)) for row, largest in sizes] if new.below else []
    rest = _needed([*new.rows, *(row for row, largest in sizes if new.above is not None and largest > new.above)])
    same = [count for count in range(len(below) + 1) if _grids(below[len(below) - count :]) == _grids(rest[:count])]
    return _needed([*below[: len(below) - max(same)], *rest])  # not what would take the same a second time


def _needed(rows: Sequence[Row]) -> list[Row]:
    """Rows of a fused operation without those to which nothing comes, and those that the next could stand for."""
    kept: list[Row] = []
    for row in rows:
        alike = [one for one in kept if _grids([one]) == _grids([row])]
        if any((one.largest or 0) >= (row.largest or 0) for one in alike):
            continue
        if kept and kept[-1] in alike:
            kept.pop()
        kept.append(row)
    return kept


def _grids(rows: Sequence[Row]) -> list[Row]:
    return [replace(row, largest=0) for row in rows]


def merged_mono(old: Sequence[Pays], new: Sequence[Pays]) -> tuple[Pays, ...]:
    """The new lines first, so that they are found before those of the same shape for more numbers of ranks."""
    return (*new, *(one for one in old if replace(one, rows=0) not in [replace(each, rows=0) for each in new]))


def merged_indexer(old: Sequence[Crossover], new: Sequence[Crossover]) -> tuple[Crossover, ...]:
    """For each kind and number of ranks of ``new`` its lines among those that there were for it, in front of all."""
    groups = dict.fromkeys((one.kind, one.worlds) for one in new)
    lines: list[Crossover] = []
    for kind, worlds in groups:
        by_rows = {one.rows: one for one in crossovers_of(old, kind, worlds[0])}
        by_rows |= {one.rows: one for one in new if (one.kind, one.worlds) == (kind, worlds)}
        lines += sorted(by_rows.values(), key=lambda one: (one.rows is None, one.rows))
    return (*lines, *(one for one in old if (one.kind, one.worlds) not in groups))


def crossovers_of(lines: Sequence[Crossover], kind: str, world: int) -> list[Crossover]:
    """Those that decide anything for this kind and number of ranks, as if for these ranks alone; rows ascending."""
    found: list[Crossover] = []
    for one in lines:
        if one.kind == kind and one.worlds[0] <= world <= one.worlds[1]:
            last = found[-1].rows if found else 0
            if last is not None and (one.rows is None or one.rows > last):
                found.append(replace(one, worlds=(world, world)))
    return found


def _clipped(rows: Sequence[Row], largest: int) -> list[Row]:
    """What ``rows`` say of messages up to ``largest`` bytes."""
    shorter = [row for row in rows if row.largest is not None and row.largest < largest]
    return [*shorter, replace(rows[len(shorter)], largest=largest)]


def _lanes(table: Table, op: str, world: int) -> list[list[Row]]:
    """The rows for eager calls and for captured ones, as if for this world alone and for any mode."""
    return [
        [replace(row, worlds=(world, world), mode="any") for row in table.of(op, world, captured)]
        for captured in (False, True)
    ]


def _regrouped(lanes: Sequence[list[list[Row]]]) -> list[Row]:
    """One operation's rows, the smallest world's first; worlds and modes that are alike share theirs."""

    def without_world(world: int) -> list[list[Row]]:
        return [[replace(row, worlds=(0, 0)) for row in lane] for lane in lanes[world - 1]]

    rows: list[Row] = []
    for (eager, graph), grouped in groupby(range(1, MAX_WORLD + 1), without_world):
        group = list(grouped)
        worlds = (group[0], group[-1])
        modes = {"any": eager} if eager == graph else {"eager": eager, "graph": graph}
        rows += [replace(row, worlds=worlds, mode=mode) for mode, lane in modes.items() for row in lane]
    return rows
