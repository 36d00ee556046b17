# SPDX-License-Identifier: Apache-2.0
"""tune without a measurement: what is worth measuring, which times make which rows, and rows into a table."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flycomm import tables
from flycomm.bench.collective import Collective
from flycomm.channel import MAX_WORLD
from flycomm.geometry import Geometry, size_class
from flycomm.layout import plan_layout
from flycomm.tables import FUSED, LOOPING, OPS, PROTOCOLS, Row, Table, carries, shipped
from flycomm.targets import Capabilities
from flycomm.tune import checks, merge, report
from flycomm.tune.candidates import CLOSE, Candidate, Grids, stages
from flycomm.tune.choice import NOISE, Choice, choose, collapsed, rows_of
from flycomm.tune.cli import main
from flycomm.tune.messages import candidate_table
from flycomm.tune.search import Clock, budget, columns
from flycomm.tune.tiles import Tiled, Tiles
from flycomm.world import World

GPU, QUICK, HOST = Grids.of(132, True, False), Grids.of(132, True, True), Grids.of(2, False, False)
SIZES = [1 << power for power in range(11, 27)]
KIB, MIB = 1 << 10, 1 << 20


def anything(grid: Geometry) -> bool:
    return True


def all_of(op: str, world: int, grids: Grids, size: int) -> list[Candidate]:
    """What is measured of a size where everything is equally fast."""
    equal: dict[Candidate, float] = {}
    for stage in stages(op, world, grids, anything):
        equal |= dict.fromkeys(stage(size, equal), 1.0)
    return list(equal)


# ------------------------------------------------------------------ candidates


@pytest.mark.parametrize("grids", [GPU, QUICK, HOST])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize("size", [16, *SIZES])
def test_every_candidate_can_be_a_row(grids: Grids, op: str, world: int, size: int):
    found = all_of(op, world, grids, size)
    assert {one.protocol for one in found} >= {"flags"}
    for one in found:
        assert carries(one.protocol, op, "sum")
        assert one.blocks <= min(128, grids.units)
        assert one.protocol in LOOPING or one.capacity == size_class(size)
        assert one.capacity <= size_class(size)
        made = candidate_table("x", op, {size: one})
        assert tables.parse(made.to_json(), "it") == made


def test_a_usual_grid_has_a_fragment_a_thread_until_it_is_full():
    assert GPU.usual(2 * KIB) == Geometry(1, 256)
    assert GPU.usual(32 * KIB) == Geometry(8, 256)
    assert GPU.usual(33 * KIB) == Geometry(16, 256)
    assert GPU.usual(MIB) == GPU.usual(64 * MIB) == Geometry(128, 256)
    assert HOST.usual(MIB) == Geometry(2, 64)
    assert Grids.of(100, True, False).usual(MIB) == Geometry(64, 256)


@pytest.mark.parametrize("grids", [GPU, QUICK])
@pytest.mark.parametrize("size", SIZES)
def test_grids_have_one_to_four_fragments_a_thread(grids: Grids, size: int):
    found = grids.all(size)
    assert len(found) == len(set(found))
    assert found[0] == grids.usual(size)
    fragments = size // 16
    for grid in found:
        threads = grid.blocks * grid.threads
        assert threads <= 2 * fragments or grid == found[0]
        assert fragments <= 4 * threads or grid.blocks * 4 >= 128


def test_a_grid_of_the_size_before_is_measured_again():
    """So that a row can go on where a larger grid wins nothing."""
    for op, size in itertools.product(OPS, SIZES[:10]):
        before, now = ({(one.protocol, one.geometry) for one in all_of(op, 2, GPU, each)} for each in (size, 2 * size))
        both = {protocol for protocol, _ in before} & {protocol for protocol, _ in now} - {"two_shot"}
        assert {(protocol, GPU.usual(size)) for protocol in both} <= now


def test_protocols_where_they_may_win():
    def protocols(op: str, world: int, size: int) -> set[str]:
        return {one.protocol for one in all_of(op, world, GPU, size)}

    assert protocols("all_reduce", 2, 8 * KIB) == {"flags", "packets", "sentinel"}
    assert protocols("all_reduce", 2, 64 * KIB) == set(PROTOCOLS)
    assert protocols("all_reduce", 1, 64 * KIB) == {"flags", "packets", "sentinel"}
    assert protocols("all_reduce", 8, 64 * MIB) == {"flags", "two_shot"}
    assert protocols("all_gather", 8, 64 * KIB) == {"flags", "packets"}


def test_what_is_far_behind_gets_no_other_grids():
    first, other_grids, pieces = stages("all_reduce", 2, GPU, anything)
    tried = first(MIB, {})
    times = {one: 10.0 * (1.0 if one.protocol == "flags" else CLOSE * 1.01) for one in tried}
    assert {one.protocol for one in other_grids(MIB, times)} == {"flags"}
    times = {one: 10.0 * (1.0 if one.protocol == "flags" else CLOSE * 0.99) for one in tried}
    assert {one.protocol for one in other_grids(MIB, times)} == {one.protocol for one in tried}
    assert other_grids(MIB, {}) == pieces(MIB, {}) == [], "everything was wrong"


def test_pieces_are_those_of_the_best_looping_grids():
    *_, pieces = stages("all_reduce", 4, GPU, anything)
    best, worse = Candidate("two_shot", 64, 512, 2 * MIB), Candidate("two_shot", 128, 128, 2 * MIB)
    other = Candidate("flags", 128, 256, 2 * MIB)
    found = pieces(8 * MIB, {best: 9.0, worse: 10.0, other: 9.5})
    assert {(one.protocol, one.geometry) for one in found} == {("two_shot", best.geometry), ("flags", other.geometry)}
    assert {one.capacity for one in found} == {512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB}
    assert {one.capacity for one in pieces(MIB, {replace(best, capacity=MIB): 1.0})} == {512 * KIB, MIB}


def test_grids_that_do_not_fit_are_not_named():
    for stage in stages("all_reduce", 2, GPU, lambda grid: grid.blocks <= 8):
        assert all(one.blocks <= 8 for one in stage(MIB, {Candidate("flags", 8, 256, MIB): 1.0}))


def test_columns_are_the_first_of_every_size_then_the_second():
    a, b, c = (Candidate("flags", blocks, 64, 4096) for blocks in (1, 2, 4))
    assert list(columns({1: [a, b], 2: [], 4: [c]}, lambda *anything: True)) == [{1: a, 4: c}, {1: b}]
    assert list(columns({1: [], 2: []}, lambda *anything: True)) == []


def test_what_one_table_cannot_hold_is_in_columns_of_its_own():
    a, b, c = (Candidate("flags", blocks, 64, 4096) for blocks in (1, 2, 4))
    apart = columns({1: [a, b], 2: [c], 4: [c]}, lambda column, size, one: c not in column.values())
    assert list(apart) == [{1: a, 2: c}, {1: b, 4: c}]


@given(world=st.integers(1, MAX_WORLD), graphs=st.booleans(), op=st.sampled_from(OPS), data=st.data())
def test_the_budget_of_a_column_gives_every_candidate_its_channel(world: int, graphs: bool, op: str, data: Any):
    sizes = data.draw(st.lists(st.sampled_from(SIZES), min_size=1, unique=True))
    column = {size: data.draw(st.sampled_from(all_of(op, world, GPU, size))) for size in sizes}
    table = candidate_table("x", op, column)
    layout = plan_layout(table, world, budget(table, world, graphs), 1, graphs)
    for size, candidate in column.items():
        rows = layout.routes[op, graphs]
        row = next(row for row in rows if row.largest is None or size <= row.largest)
        assert Candidate.in_force(row, size) == candidate


def test_time_is_shared_out_by_what_there_is_to_measure():
    clock = Clock(time.monotonic() + 100, [30, 10, 10])
    clock.begin()
    assert clock.until - time.monotonic() == pytest.approx(60, abs=1)
    clock.begin()
    assert clock.until - time.monotonic() == pytest.approx(50, abs=1)
    clock.begin()
    assert clock.until == pytest.approx(clock.deadline, abs=0.1)


# ------------------------------------------------------------------ choices

SMALL, LARGE = Candidate("packets", 1, 128, 4096), Candidate("flags", 8, 256, 4096)


def at(one: Candidate, size: int) -> Candidate:
    return Candidate.of(one.protocol, one.geometry, size, 2 * MIB)


def test_a_later_size_changes_only_for_more_than_the_noise():
    def second(gain: float) -> str:
        times = {4096: {SMALL: 2.0, LARGE: 3.0}, 8192: {at(SMALL, 8192): 3.0 * (1 + gain), at(LARGE, 8192): 3.0}}
        return choose(times)[1].candidate.protocol

    assert second(NOISE * 0.9) == "packets"
    assert second(NOISE * 1.1) == "flags"


def test_a_larger_grid_goes_on_where_a_smaller_one_is_no_slower():
    times = {4096: {SMALL: 3.0, LARGE: 2.0}, 8192: {at(SMALL, 8192): 3.0, at(LARGE, 8192): 3.0 * (1 + NOISE * 0.9)}}
    assert [one.candidate.protocol for one in choose(times)] == ["flags", "flags"]


def test_the_first_size_takes_the_fewest_threads_within_the_noise():
    assert choose({4096: {SMALL: 2.0 * (1 + NOISE * 0.9), LARGE: 2.0}}) == [
        Choice(4096, SMALL, 2.0 * (1 + NOISE * 0.9))
    ]
    assert choose({4096: {SMALL: 2.0 * (1 + NOISE * 1.1), LARGE: 2.0}}) == [Choice(4096, LARGE, 2.0)]


def test_the_noise_does_not_add_up_from_size_to_size():
    """What goes on is compared with the best of its own size."""
    times = {size: {at(SMALL, size): 3.0 * (1 + 0.015 * k), at(LARGE, size): 3.0} for k, size in enumerate(SIZES[1:5])}
    assert [one.candidate.protocol for one in choose(times)] == ["packets", "packets", "flags", "flags"]


def test_the_other_modes_choice_goes_first():
    times = {4096: {SMALL: 2.0, LARGE: 2.0 * (1 + NOISE * 0.9)}}
    assert choose(times, {4096: LARGE})[0].candidate == LARGE
    times = {4096: {SMALL: 2.0, LARGE: 2.0 * (1 + NOISE * 1.1)}}
    assert choose(times, {4096: LARGE})[0].candidate == SMALL


def test_sizes_without_times_have_no_choice():
    assert [one.num_bytes for one in choose({4096: {SMALL: 1.0}, 2048: {SMALL: 1.0}, 8192: {}})] == [2048, 4096]


def test_neighbours_that_are_alike_are_one_row():
    sizes = (2048, 4096, 8192)
    rows = rows_of("all_reduce", (2, 2), [Choice(size, at(SMALL, size), 1.0) for size in sizes])
    assert rows == [Row("all_reduce", (2, 2), "any", 8192, "packets", 1, 128, 8192)]


def test_pieces_are_alike_where_they_hold_the_whole_message():
    flags = Candidate("flags", 64, 256, MIB)
    whole = [(MIB, MIB), (2 * MIB, 2 * MIB), (4 * MIB, 2 * MIB)]
    rows = rows_of("all_reduce", (2, 2), [Choice(size, replace(flags, capacity=piece), 1.0) for size, piece in whole])
    assert [(row.largest, row.capacity) for row in rows] == [(4 * MIB, 2 * MIB)]
    smaller = [(2 * MIB, 2 * MIB), (4 * MIB, MIB)]
    rows = rows_of("all_reduce", (2, 2), [Choice(size, replace(flags, capacity=piece), 1.0) for size, piece in smaller])
    assert [(row.largest, row.capacity) for row in rows] == [(2 * MIB, 2 * MIB), (4 * MIB, MIB)]


@given(st.data())
def test_collapsed_rows_do_the_same(data: Any):
    rows = []
    for size in SIZES[:8]:
        protocol = data.draw(st.sampled_from(("flags", "packets")))
        piece = data.draw(st.sampled_from((4096, 16 * KIB, MIB)))
        rows.append(Candidate.of(protocol, Geometry(1, 64), size, piece).row("all_gather", (1, 8), size))
    fewer = collapsed(rows)
    for size in SIZES[:8]:
        old, new = (next(row for row in each if size <= (row.largest or size)) for each in (rows, fewer))
        assert Candidate.in_force(old, size) == Candidate.in_force(new, size)
    assert all(a.protocol != b.protocol or a.capacity != b.capacity for a, b in itertools.pairwise(fewer))


# ------------------------------------------------------------------ into a table


def in_force(table: Table, op: str, world: int, captured: bool, size: int) -> Candidate:
    rows = table.of(op, world, captured)
    return Candidate.in_force(next(row for row in rows if row.largest is None or size <= row.largest), size)


def drawn_choices(data: Any, op: str) -> list[Choice]:
    first = data.draw(st.integers(0, len(SIZES) - 1))
    last = data.draw(st.integers(first, len(SIZES) - 1))
    return [Choice(size, data.draw(st.sampled_from(all_of(op, 2, GPU, size))), 1.0) for size in SIZES[first : last + 1]]


@given(
    arch=st.sampled_from(("host", "sm_90", "gfx942")),
    world=st.integers(1, MAX_WORLD),
    graphs=st.booleans(),
    data=st.data(),
)
def test_what_was_not_measured_stays_and_what_was_is_there(arch: str, world: int, graphs: bool, data: Any):
    base = shipped(arch)
    lanes = data.draw(st.sets(st.tuples(st.sampled_from(OPS), st.booleans() if graphs else st.just(False)), min_size=1))
    found = {lane: drawn_choices(data, lane[0]) for lane in sorted(lanes)}
    table = merge.merged(base, arch, world, found, graphs, ("these", "a test"))
    for op, one, captured, size in itertools.product(OPS, range(1, MAX_WORLD + 1), (False, True), [64, *SIZES]):
        choices = {choice.num_bytes: choice.candidate for choice in found.get((op, captured and graphs), ())}
        now = in_force(table, op, one, captured, size)
        if one == world and size in choices:
            assert now == choices[size]
        elif one == world and choices and (size > max(choices) >= merge.FILLS_THE_LINK or size < min(choices) <= 4096):
            continue
        else:
            assert now == in_force(base, op, one, captured, size)
    for op, one, captured in itertools.product(FUSED, range(1, MAX_WORLD + 1), (False, True)):
        now, before = (
            [replace(row, worlds=(one, one), mode="any") for row in of.of(op, one, captured)] for of in (table, base)
        )
        assert now == before, "what is not tuned at all stays too"


def test_the_ends_take_what_is_shorter_and_longer():
    base = shipped("sm_90")
    flags = Candidate("flags", 16, 128, MIB)
    choices = [Choice(2048, SMALL, 1.0), Choice(16 * MIB, flags, 1.0)]
    table = merge.merged(base, "sm_90", 2, {("all_reduce", True): choices}, True, ("these", "a test"))
    assert in_force(table, "all_reduce", 2, True, 64) == SMALL
    assert in_force(table, "all_reduce", 2, True, 128 * MIB) == flags
    assert len(table.of("all_reduce", 2, True)) == 2
    assert table.of("all_reduce", 2, False) == tuple(
        replace(row, worlds=(2, 2), mode="eager") for row in base.of("all_reduce", 2, False)
    )


def test_modes_that_are_alike_share_rows():
    choices = [Choice(2048, SMALL, 1.0)]
    both = {("all_gather", captured): choices for captured in (False, True)}
    table = merge.merged(shipped("sm_90"), "sm_90", 2, both, True, ("these", "a test"))
    assert {row.mode for row in table.rows} == {"any"}
    assert [row.worlds for row in table.rows if row.op == "all_gather" and row.largest is None] == [
        (1, 1),
        (2, 2),
        (3, 4),
        (5, 8),
    ]


def test_a_table_tells_what_measured_it_once():
    base = shipped("sm_90")
    found = {("all_gather", True): [Choice(2048, SMALL, 1.0)]}
    once = merge.merged(base, "sm_80", 2, found, True, ("2 ranks, all_gather", "one command"))
    assert (once.arch, once.source) == ("sm_80", "measured")
    assert once.how == f"2 ranks, all_gather: one command | {base.how}"
    twice = merge.merged(once, "sm_80", 2, found, True, ("2 ranks, all_gather", "another"))
    assert twice.how == f"2 ranks, all_gather: another | {base.how}"
    more = merge.merged(once, "sm_80", 4, found, True, ("4 ranks, all_gather", "a third"))
    assert more.how == f"4 ranks, all_gather: a third | {once.how}"


# ------------------------------------------------------------------ data


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("size", [64, 32 * KIB, pytest.param(400_006, marks=pytest.mark.full)])
def test_tiles_are_what_the_collective_makes_of_them(op: str, size: int):
    what, tiles = Collective.of(op, None), Tiles(3, torch.device("cpu"))
    problems = []
    for rank in range(3):
        world: Any = SimpleNamespace(size=3, rank=rank)
        context: Any = SimpleNamespace(world=world, collective=what)
        problems.append(Tiled(context, tiles, size))
    for buffer in range(4):
        inputs = [problem.inputs[buffer] for problem in problems]
        assert inputs[0].numel() == what.input_numel(size // 2, 3)
        for rank, problem in enumerate(problems):
            expected = what.expected(inputs, rank)
            assert problem.judge({buffer: expected}, False).correct
            assert not problem.judge({(buffer + 1) % 4: expected}, False).correct
            wrong = expected.clone()
            wrong.view(torch.int16)[-1] ^= 1
            assert not problem.judge({buffer: wrong}, False).correct
            for shift in (8 << power for power in range(20) if 8 << power < expected.numel()):
                moved = problem.judge({buffer: expected.roll(shift)}, False)
                assert (moved.correct, moved.max_error > 0) == (False, True)
        assert not torch.equal(inputs[0], inputs[1])


# ------------------------------------------------------------------ what a user types


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ops", "broadcast"], ["--ops broadcast", "all_gather"]),
        (["--ops", ","], ["--ops", "nothing"]),
        (["--modes", "lazy"], ["--modes lazy", "graph, eager"]),
        (["--modes", ""], ["--modes", "nothing"]),
        (["--modes", "graph"], ["mode graph", "target host", "use eager"]),
        (["--from", "3KiB"], ["--from 3072 bytes", "power of two"]),
        (["--to", "2GiB"], ["--to 2147483648", "1GiB"]),
        (["--from", "8"], ["--from 8 bytes", "16 B"]),
        (["--from", "8kb"], ["'8kb'"]),
        (["--from", "8KiB", "--to", "4KiB"], ["--from 8KiB is over --to 4KiB"]),
        (["--limit-seconds", "0"], ["--limit-seconds 0"]),
        (["--limit-seconds", "nan"], ["--limit-seconds nan"]),
        (["--world", "0"], ["--world 0"]),
        (["--to", "1GiB", "--world", "8"], ["--to 1GiB", "MiB of a device", "smaller --to"]),
        (["--out", "/dev/null/table.json"], ["/dev/null/table.json", "--out"]),
        (["--out", "."], ["--out"]),
        (["--show", "--out", "no/such/file"], ["no/such/file cannot be read"]),
    ],
)
def test_bad_options_end_with_one_sentence(options: list[str], words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["--target", "host", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("flycomm tune: ")
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words), captured.err


def test_a_file_that_is_no_table_is_not_written_over(tmp_path, capsys):
    path = tmp_path / "notes.json"
    path.write_text("{}")
    assert main(["--target", "host", "--dry-run", "--out", str(path)]) == 2
    assert "notes.json is not a dispatch table" in capsys.readouterr().err
    assert path.read_text() == "{}"


def test_only_rank_0_needs_to_be_able_to_write(tmp_path):
    def rank(world: World) -> None:
        checks.check_place(world, tmp_path / "new" / "table.json" if world.rank == 0 else tmp_path)

    World.local(2).run(rank)


def test_ranks_measure_what_fits_all_of_them():
    def rank(world: World) -> Any:
        found = Capabilities("x", "sm_90", 32, 132 - world.rank, 1 << 37, 1_000_000_000, True)
        agreed, sharing = checks.agreed_capabilities(world, found)
        return agreed.compute_units, sharing

    assert World.local(3, devices=[0, 1, 0]).run(rank) == [(130, 2)] * 3


def test_a_dry_run_says_how_much_would_be_measured(tmp_path, capsys):
    path = tmp_path / "table.json"
    options = ["--world", "3", "--from", "2KiB", "--to", "4KiB", "--ops", "all_gather", "--out", str(path)]
    assert main(["--target", "host", "--dry-run", *options]) == 0
    shown = capsys.readouterr().out
    assert "all_gather, 3 ranks on host" in shown
    assert f"measurements at most, for {path}; nothing was measured" in shown
    assert not path.exists()


@pytest.mark.parametrize("arch", ["host", "sm_90"])
def test_show_has_every_row(arch, capsys):
    table = shipped(arch)
    report.show_table(table, "it came with flycomm")
    shown = capsys.readouterr().out
    assert f"dispatch table for {arch}, {table.source}: it came with flycomm" in shown
    assert table.how in shown
    assert sum(" × " in line and "grid of" not in line for line in shown.splitlines()) == len(table.rows)


def test_show_prints_the_table_in_force(tmp_path, capsys, monkeypatch):
    assert main(["--show", "--target", "host"]) == 0
    assert "it came with flycomm" in capsys.readouterr().out
    arch = json.loads(shipped("host").to_json()) | {"arch": "x86-64", "how": "by hand"}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(arch))
    monkeypatch.setenv("FLYCOMM_TABLE", str(path))
    assert main(["--show", "--target", "host"]) == 0
    shown = capsys.readouterr().out
    assert str(path) in shown
    assert "by hand" in shown
