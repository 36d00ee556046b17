# SPDX-License-Identifier: Apache-2.0
"""From times of fused norms and of separate kernels to rows of a table. No device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flycomm.bench.problem import Case
from flycomm.tables import FUSED, Row
from flycomm.tune.candidates import Candidate, Times
from flycomm.tune.choice import NOISE, Choice, choose_from_the_longest
from flycomm.tune.crossover import wins_first
from flycomm.tune.merge import Fusing

OP = FUSED[0]
SEPARATE = Candidate("separate", 0, 0, 0)


@dataclass(frozen=True)
class Fused:
    """What was found for calls of one mode."""

    rows: Fusing
    choices: tuple[Choice, ...]  # that pay, the shortest first
    unfused: tuple[int, ...]  # bytes of sizes that no row takes
    lost: tuple[int, ...]  # of sizes that one takes although separate kernels are faster, since what is longer pays


def what_pays(times: Mapping[Case, Times], world: int, graph: Fused | None) -> Fused | None:
    """None where no case has a candidate that is right; ``graph``: of captured calls, where they were measured."""
    fused, apart = by_bytes(times)
    if not fused:
        return None
    sizes = list(fused)
    best = [min(fused[each].values()) for each in sizes]
    against = [(us, apart.get(each, us) * (1 + NOISE)) for each, us in zip(sizes, best, strict=True)]
    paying = sizes[: wins_first(against)]
    preferred = {one.num_bytes: one.candidate for one in graph.choices} if graph is not None else {}
    choices = choose_from_the_longest({each: fused[each] for each in paying}, preferred)
    shortest = min(size.rows or 0 for size in times if size.num_bytes == sizes[0])
    rows = Fusing(
        tuple(rows_of((world, world), choices)),
        0 if shortest == 1 else sizes[0] // 2,  # nothing has fewer rows than one
        sizes[-1] if paying == sizes else None,
    )
    lost = tuple(each for each, (us, other_us) in zip(paying, against, strict=False) if other_us < us)
    return Fused(rows, tuple(choices), tuple(sizes[len(paying) :]), lost)


def by_bytes(times: Mapping[Case, Times]) -> tuple[dict[int, Times], dict[int, float]]:
    """Of candidates, and of separate kernels: µs by the bytes of a message, as a table has them. Cases of as many bytes
    are one size: what was measured of all of them, with the largest capacity and all times added."""
    fused: dict[int, Times] = {}
    apart: dict[int, float] = {}
    for num_bytes in sorted({size.num_bytes for size in times}):
        alike = [measured for size, measured in times.items() if size.num_bytes == num_bytes and measured]
        grids: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
        for measured in alike:
            for one, us in measured.items():
                grids.setdefault((one.protocol, one.blocks, one.threads), []).append((one.capacity, us))
        for (protocol, blocks, threads), each in grids.items():
            if len(each) < len(alike):
                continue
            us = sum(us for _, us in each)
            if protocol == SEPARATE.protocol:
                apart[num_bytes] = us
            else:
                one = Candidate(protocol, blocks, threads, max(capacity for capacity, _ in each))
                fused[num_bytes] = {**fused.get(num_bytes, {}), one: us}
    return fused, apart


def rows_of(worlds: tuple[int, int], choices: Sequence[Choice]) -> list[Row]:
    """Each size takes what is longer than the size before; neighbours of one grid are one row, with room for both."""
    rows: list[Row] = []
    for choice in choices:
        row = row_of(choice.candidate, worlds, choice.num_bytes)
        if rows and (rows[-1].protocol, rows[-1].geometry) == (row.protocol, row.geometry):
            row = replace(row, capacity=max(row.capacity, rows.pop().capacity))
        rows.append(row)
    return rows


def row_of(candidate: Candidate, worlds: tuple[int, int], num_bytes: int) -> Row:
    return candidate.row(OP, worlds, num_bytes)
