# SPDX-License-Identifier: Apache-2.0
"""Rows into a table. What was not measured stays: other operations, worlds, modes, and sizes outside those measured.

The smallest size measured takes all that is shorter where it is at most a staging slot's least, and the largest all
that is longer where messages of its size fill the link: there sizes are alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from flycomm.channel import MAX_WORLD
from flycomm.geometry import SMALLEST_CLASS
from flycomm.tables import FUSED, LOOPING, OPS, Row, Table, parse
from flycomm.tune.choice import Choice, collapsed, rows_of

FILLS_THE_LINK = 16 << 20  # bytes
_BETWEEN = " | "  # the commands that made a table

Found = Mapping[tuple[str, bool], Sequence[Choice]]  # (op, captured) → choices, the smallest size first


def merged(base: Table, arch: str, world: int, found: Found, graphs: bool, how: tuple[str, str]) -> Table:
    """``base`` with what was found for ``world`` ranks in it, as a measured table of ``arch``.

    ``graphs``: whether calls can be captured; where they cannot, what was found is for any mode. ``how``: what was
    measured, and by what; it takes the place of what ``base`` says of the same.
    """
    rows: list[Row] = []
    for op in (*OPS, *FUSED):
        lanes = [_lanes(base, op, one) for one in range(1, MAX_WORLD + 1)]
        for captured in (False, True):
            choices = found.get((op, captured if graphs else False))
            if choices:
                lanes[world - 1][captured] = spliced(lanes[world - 1][captured], op, choices)
        rows += _regrouped(lanes)
    told = [part for part in base.how.split(_BETWEEN) if not part.startswith(f"{how[0]}: ")]
    table = Table(
        arch,
        "measured",
        _BETWEEN.join([f"{how[0]}: {how[1]}", *told]),
        tuple(rows),
        mono=base.mono,
        indexer=base.indexer,
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
