# SPDX-License-Identifier: Apache-2.0
"""tune of the fused norm without a measurement: candidates, which of them pay, and their rows in a table."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flycomm import tables
from flycomm.bench import cases
from flycomm.bench.problem import Case
from flycomm.channel import MAX_WORLD
from flycomm.geometry import Geometry
from flycomm.kernels.reduce_norm import slot_bytes
from flycomm.layout import plan_layout
from flycomm.tables import Row, Table, shipped
from flycomm.tune import merge
from flycomm.tune.candidates import CLOSE, Candidate, Grids
from flycomm.tune.choice import NOISE, choose_from_the_longest
from flycomm.tune.fusing import OP, SEPARATE, Fused
from flycomm.tune.norms import Norms
from flycomm.tune.search import budget, columns

GPU, HOST = Grids.of(132, True, False), Grids.of(2, False, False)
HIDDEN, ROWS = (64, 1024, 4096, 6144, 7168, 8192), (1, 2, 3, 4, 16, 64, 200)
SHAPES = list(itertools.product(ROWS, HIDDEN))


def anything(grid: Geometry) -> bool:
    return True


def norms(
    rows: str, hidden: str, arch: str = "sm_90", world: int = 2, grids: Grids = GPU, fits: Any = anything
) -> Norms:
    sizes = cases.of(OP, {"rows": rows, "hidden": hidden})
    return Norms(sizes, world, shipped(arch), grids, fits, shipped(arch))


def all_of(one: Norms, size: Case) -> list[Candidate]:
    """What is measured where all are equally fast."""
    equal = dict.fromkeys(one.known(True)(size, {}), 1.0)
    for stage in one.stages():
        equal |= dict.fromkeys(stage(size, equal), 1.0)
    return list(equal)


def first_of(routes: Sequence[Row], rows: int, hidden: int) -> tuple[str, Geometry] | None:
    """Which row a communicator takes."""
    for row in routes:
        room = row.capacity >= slot_bytes(rows, hidden, "bf16", row.blocks, row.threads)
        if room and 2 * rows * hidden <= (row.largest or 0):
            return row.protocol, row.geometry
    return None


def row_for(table: Table, world: int, rows: int, hidden: int, captured: bool = True) -> tuple[str, Geometry] | None:
    """By a communicator that has room for all rows of the table."""
    return first_of(plan_layout(table, world, 1 << 40, 1, True).routes[OP, captured], rows, hidden)


def timed(one: Norms, us: Mapping[tuple[int, int], float], apart: Mapping[tuple[int, int], float]) -> Any:
    """Times of every candidate: ``us`` of the first packets, 10 % more of others; separate kernels as said."""
    times: Any = {}
    for size in one.sizes:
        shape = size.rows or 0, size.hidden or 0
        found = [each for each in all_of(one, size) if each != SEPARATE]
        first = next(each for each in found if each.protocol == "packets")
        times[size] = {each: us[shape] * (1 if each == first else 1.1) for each in found}
        if shape in apart:
            times[size][SEPARATE] = apart[shape]
    return times


# ------------------------------------------------------------------ candidates


@pytest.mark.parametrize("grids", [GPU, HOST])
@pytest.mark.parametrize("world", [1, 2, 8])
def test_a_table_of_every_candidate_plans_it(grids: Grids, world: int):
    """Alone, and beside those of other cases in a column."""
    one = norms("1,2,200", "64,4096,8192", world=world, grids=grids)  # of which two have as many bytes
    proposed = {size: all_of(one, size) for size in one.sizes}
    assert all({each.protocol for each in found} >= {"separate", "flags"} for found in proposed.values())
    seen: list[tuple[Case, Candidate]] = []
    for column in columns(proposed, one.together):
        table = one.table("sm_90", column)
        assert tables.parse(table.to_json(), "it") == table
        routes = plan_layout(table, world, budget(table, world, True), 1, True).routes[OP, True]
        for size, candidate in column.items():
            meant = None if candidate == SEPARATE else (candidate.protocol, candidate.geometry)
            assert first_of(routes, size.rows or 0, size.hidden or 0) == meant
            seen.append((size, candidate))
    assert len(seen) == len(set(seen)) == sum(map(len, proposed.values()))


def test_separate_kernels_go_by_the_rows_that_were_found_before():
    one = norms("1", "4096")
    one.in_force = replace(one.base, rows=tuple(replace(row, blocks=3) for row in one.base.rows))
    table = one.table("x", {one.sizes[0]: SEPARATE})
    assert {row.blocks for row in table.rows} == {3}
    assert OP not in {row.op for row in table.rows}


def test_a_row_has_a_block_and_a_thread_few_fragments():
    one = norms("1,4,100", "1024,7168,32768")
    for size in one.sizes:
        found = [each for each in all_of(one, size) if each.protocol == "flags"]
        assert {each.blocks for each in found} == {{1: 1, 4: 4, 100: 128}[size.rows or 0], 128}
        assert {each.threads for each in found} <= {128, 256, 512}
    least = {size.hidden: min(each.threads for each in all_of(one, size) if each != SEPARATE) for size in one.sizes}
    assert least == {1024: 128, 7168: 128, 32768: 512}, "a row of 32768 in 256 threads is 16 fragments of a thread"


def test_what_is_known_is_what_the_table_has():
    one = norms("1,64", "7168", "sm_90", 2)
    known = {size.rows: one.known(True)(size, {}) for size in one.sizes}
    assert [each.protocol for each in known[1]] == ["sentinel", "separate"]
    assert [each.protocol for each in known[64]] == ["flags", "separate"]
    assert known[1][0] == Candidate("sentinel", 32, 512, 1 << 19)
    one = norms("1", "7168", fits=lambda grid: grid.blocks * grid.threads < 32 * 512)
    assert one.known(True)(one.sizes[0], {}) == [SEPARATE], "no row that fits the device"


def test_what_is_far_behind_gets_no_other_grids():
    one = norms("1,16", "7168")
    size = one.sizes[0]
    usual, others = one.stages()
    tried = usual(size, {})
    times = {each: 1.0 if each.protocol == "flags" else CLOSE * 1.01 for each in tried} | {SEPARATE: 0.1}
    assert {each.protocol for each in others(size, times)} == {"flags"}
    assert others(size, {SEPARATE: 0.1}) == [], "everything was wrong"


def test_candidates_that_do_not_fit_are_not_named():
    """Threads of short blocks count double."""

    def threads(room: int) -> set[int]:
        one = norms("16", "4096", fits=lambda grid: grid.blocks * grid.threads <= room)
        return {each.threads for each in all_of(one, one.sizes[0]) if each != SEPARATE}

    assert threads(16 * 512) == {128, 256, 512}
    assert threads(16 * 512 - 1) == {128}
    assert threads(16 * 256 - 1) == set()


# ------------------------------------------------------------------ choices

WIDE, NARROW = Candidate("packets", 16, 256, 1 << 18), Candidate("packets", 1, 256, 1 << 14)


def test_a_grid_goes_on_to_shorter_messages():
    times = {1024: {NARROW: 2.0, WIDE: 2.0 * (1 + NOISE * 0.9)}, 4096: {NARROW: 4.0, WIDE: 3.0}}
    assert [one.candidate for one in choose_from_the_longest(times)] == [WIDE, WIDE]
    times[1024][WIDE] = 2.0 * (1 + NOISE * 1.1)
    assert [one.candidate for one in choose_from_the_longest(times)] == [NARROW, WIDE]
    assert [one.num_bytes for one in choose_from_the_longest({**times, 512: {}})] == [1024, 4096]


def test_the_other_modes_grid_goes_first():
    times = {1024: {NARROW: 2.0, WIDE: 2.0}, 4096: {NARROW: 3.0, WIDE: 3.0}}
    assert [one.candidate for one in choose_from_the_longest(times)] == [NARROW, NARROW]
    assert [one.candidate for one in choose_from_the_longest(times, {1024: WIDE})] == [WIDE, NARROW]
    room = replace(WIDE, capacity=1 << 20)
    assert [one.candidate for one in choose_from_the_longest(times, {4096: room})] == [WIDE, WIDE]


def test_what_is_longer_than_where_fusing_loses_has_no_row():
    one = norms("1,4,16", "4096")
    shapes = [(1, 4096), (4, 4096), (16, 4096)]
    us = dict.fromkeys(shapes, 10.0)
    found = one.found(timed(one, us, dict(zip(shapes, (20.0, 20.0, 5.0), strict=True))), None)
    assert found is not None
    assert (found.unfused, found.lost) == ((16 * 8192,), ())
    assert (found.rows.below, found.rows.above) == (0, None)
    table = merge.merged(one.base, "sm_90", 2, {(OP, True): found.rows}, True, ("these", "a test"))
    assert row_for(table, 2, 4, 4096) == ("packets", Geometry(4, 256))
    assert row_for(table, 2, 16, 4096) is row_for(table, 2, 64, 4096) is None
    assert row_for(table, 2, 16, 4096, captured=False) == row_for(one.base, 2, 16, 4096)
    assert row_for(table, 4, 16, 4096) == row_for(one.base, 4, 16, 4096)
    assert one.notes("graph", found) == [
        f"{OP}, graph: separate kernels are faster from 128 KiB on, so nothing as long is fused"
    ]


def test_a_loss_between_wins_stays_fused_and_is_told():
    one = norms("1,4,16", "4096")
    shapes = [(1, 4096), (4, 4096), (16, 4096)]
    apart = dict(zip(shapes, (20.0, 9.0, 20.0), strict=True))
    found = one.found(timed(one, dict.fromkeys(shapes, 10.0), apart), None)
    assert found is not None
    assert (found.unfused, found.lost, found.rows.above) == ((), (4 * 8192,), 16 * 8192)
    assert "faster at 32 KiB too" in one.notes("graph", found)[0]
    apart[4, 4096] = 10.0 * (1 - NOISE * 0.9)
    found = one.found(timed(one, dict.fromkeys(shapes, 10.0), apart), None)
    assert found is not None
    assert one.notes("graph", found) == [], "that is noise"


def test_nothing_is_fused_where_nothing_pays():
    one = norms("1,4", "4096")
    shapes = [(1, 4096), (4, 4096)]
    found = one.found(timed(one, dict.fromkeys(shapes, 10.0), dict.fromkeys(shapes, 5.0)), None)
    assert found is not None
    table = merge.merged(one.base, "sm_90", 2, {(OP, True): found.rows}, True, ("these", "a test"))
    assert table.of(OP, 2, True) == ()
    assert len(table.of(OP, 2, False)) == len(one.base.of(OP, 2, False))


def test_shapes_of_as_many_bytes_are_one_size():
    one = norms("1,2", "4096,8192")
    shapes = [(1, 4096), (2, 4096), (1, 8192), (2, 8192)]
    found = one.found(timed(one, dict.fromkeys(shapes, 10.0), {}), None)
    assert found is not None
    assert [each.num_bytes for each in found.choices] == [8192, 16384, 32768]
    both = next(each for each in found.choices if each.num_bytes == 16384)
    assert both.us >= 20.0, "times are added"
    table = merge.merged(one.base, "sm_90", 2, {(OP, True): found.rows}, True, ("these", "a test"))
    assert row_for(table, 2, 2, 4096) == row_for(table, 2, 1, 8192) != row_for(one.base, 2, 2, 4096)


def test_cases_without_times_change_nothing():
    one = norms("1,4", "4096")
    assert one.found({size: {} for size in one.sizes}, None) is None
    assert one.found({size: {SEPARATE: 1.0} for size in one.sizes}, None) is None
    assert one.missing(None) == 2


# ------------------------------------------------------------------ into a table


@settings(max_examples=12)
@given(
    arch=st.sampled_from(("sm_90", "gfx942")),
    world=st.integers(1, MAX_WORLD),
    rows=st.sets(st.sampled_from(ROWS[:6]), min_size=1),
    hidden=st.sets(st.sampled_from(HIDDEN), min_size=1),
    data=st.data(),
)
def test_what_was_not_measured_stays_and_what_was_is_there(arch: str, world: int, rows: Any, hidden: Any, data: Any):
    one = norms(",".join(map(str, rows)), ",".join(map(str, hidden)), arch, world)
    times: Any = {
        size: {each: data.draw(st.floats(1.0, 2.0)) for each in all_of(one, size)[:6]} | {SEPARATE: 3.0}
        for size in one.sizes
    }
    found = one.found(times, None)
    assert isinstance(found, Fused)
    table = merge.merged(one.base, arch, world, {(OP, True): found.rows}, True, ("these", "a test"))
    first, last = (end(size.num_bytes for size in one.sizes) for end in (min, max))
    shortest = min(size.rows or 0 for size in one.sizes if size.num_bytes == first)
    chosen = {each.num_bytes: each.candidate for each in found.choices}
    for ranks, captured, (many, width) in itertools.product({world, world % 8 + 1}, (False, True), SHAPES):
        now, before = (first_of(each.of(OP, ranks, captured), many, width) for each in (table, one.base))
        num_bytes = 2 * many * width
        if (ranks, captured) != (world, True) or num_bytes > last:
            assert now == before
        elif num_bytes <= first // 2 and shortest > 1:
            assert before in (now, None), "what had no row with room for it may have one now"
        elif num_bytes in chosen and (many, width) in {(size.rows, size.hidden) for size in one.sizes}:
            assert now == (chosen[num_bytes].protocol, chosen[num_bytes].geometry)
    again = merge.merged(table, arch, world, {(OP, True): found.rows}, True, ("these", "a test"))
    assert again == table, "measured twice it is the same table"


def test_rows_of_one_grid_are_one_with_room_for_all():
    one = norms("1,4", "7168")
    wide = Candidate("packets", 4, 512, 1 << 16)
    times: Any = {size: {wide: 1.0} for size in one.sizes}
    found = one.found(times, None)
    assert found is not None
    assert found.rows.rows == (Row(OP, (2, 2), "any", 4 * 7168 * 2, "packets", 4, 512, 1 << 16),)
    one.sizes = one.sizes[1:]
    found = one.found({size: times[size] for size in one.sizes}, None)
    assert found is not None
    assert found.rows.below == 4 * 7168, "one row was not measured: what is shorter stays"
