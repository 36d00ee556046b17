# SPDX-License-Identifier: Apache-2.0
"""Where one way takes over from another: from two times a size to a line of a table."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flycomm.bench import cases
from flycomm.indexer.applies import applies
from flycomm.tables import Pays, parse, shipped
from flycomm.tables.crossovers import Crossover
from flycomm.tune import merge, report
from flycomm.tune.cli import main
from flycomm.tune.crossings import Duel, Indexing, Mono
from flycomm.tune.crossover import rows_up_to, shared_from, wins_first

WIN, LOSS, SAME = (1.0, 2.0), (2.0, 1.0), (1.0, 1.0)


@pytest.mark.parametrize(
    ("pairs", "count"),
    [
        ([], 0),
        ([WIN], 1),
        ([LOSS], 0),
        ([SAME], 1),
        ([WIN, WIN, LOSS], 2),
        ([WIN, LOSS, WIN, LOSS, LOSS], 3),
        ([WIN, LOSS, WIN, WIN], 4),
        ([LOSS, WIN], 2),
        ([LOSS, LOSS, WIN], 0),
        ([WIN, (1.01, 1.0), WIN], 3),
        ([(100.0, 200.0), (3.0, 1.0), WIN], 1),
    ],
)
def test_the_first_way_is_taken_for_as_many_as_it_is_best_for_together(pairs: list[Any], count: int):
    assert wins_first(pairs) == count


@given(st.lists(st.tuples(st.floats(1.0, 1e4), st.floats(1.0, 1e4)), max_size=8))
def test_no_other_size_to_change_at_is_better(pairs: list[tuple[float, float]]):
    def lost(count: int) -> float:
        ours = [pair[i >= count] / min(pair) for i, pair in enumerate(pairs)]
        return sum(ours)

    best = lost(wins_first(pairs))
    assert all(best <= lost(count) + 1e-6 for count in range(len(pairs) + 1))


@pytest.mark.parametrize(
    ("measured", "before", "rows"),
    [
        ({1: WIN, 4: WIN, 16: LOSS}, None, 4),
        ({1: WIN, 4: WIN, 16: LOSS}, 48, 4),
        ({1: LOSS, 4: LOSS}, 16, 0),
        ({1: WIN, 4: WIN}, None, 4),
        ({1: WIN, 4: WIN}, 16, 16),  # 5 to 16 were not measured
        ({4: LOSS, 8: LOSS}, None, 3),
        ({4: LOSS, 8: LOSS}, 2, 2),
        ({4: LOSS, 8: LOSS}, 16, 3),
        ({16: WIN, 1: WIN, 48: LOSS}, 2, 16),
    ],
)
def test_rows_up_to_which_one_launch_pays(measured: Any, before: int | None, rows: int):
    assert rows_up_to(measured, before) == rows


@pytest.mark.parametrize(
    ("measured", "before", "context"),
    [
        ({100: (8.0, 5.0), 200: (8.0, 9.0)}, 0, 175),  # a loss of 3, then a gain of 1
        ({100: (8.0, 7.0), 200: (8.0, 11.0), 400: WIN}, None, 125),
        ({100: LOSS, 200: SAME, 400: WIN}, None, 400),  # no gain at 200, and no loss
        ({100: WIN, 200: WIN}, None, 100),
        ({100: WIN, 200: WIN}, 50, 50),  # shorter ones were not measured
        ({100: WIN, 200: WIN}, 300, 100),
        ({100: LOSS, 200: LOSS}, 0, None),
        ({100: LOSS, 200: LOSS}, 150, None),
        ({100: LOSS, 200: LOSS}, 300, 300),
        ({100: LOSS, 200: LOSS}, None, None),
        ({100: LOSS, 200: WIN, 400: (1.01, 1.0), 800: WIN}, 0, 150),
    ],
)
def test_the_context_from_which_on_sharing_pays(measured: Any, before: int | None, context: int | None):
    assert shared_from(measured, before) == context


# ------------------------------------------------------------------ lines of a table


def test_a_line_of_this_world_goes_before_those_of_several():
    old = (
        Pays("mono_ffn", (1, 8), 64, 32, 16),
        Pays("mono_ffn", (2, 2), 64, 32, 8),
        Pays("mono_ffn", (2, 2), 64, 48, 4),
    )
    new = Pays("mono_ffn", (2, 2), 64, 32, 2)
    assert merge.merged_mono(old, [new]) == (new, old[0], old[2])
    table = merge.merged(shipped("host"), "host", 2, {}, True, ("these", "a test"), [new])
    assert (table.pays_up_to("mono_ffn", 2, 64, 32), table.pays_up_to("mono_ffn", 3, 64, 32)) == (2, None)
    assert {row.op for row in table.rows} == {row.op for row in shipped("host").rows}


lines = st.builds(
    Crossover,
    st.sampled_from(("dsa", "block_max")),
    st.sampled_from(((2, 2), (4, 4))),
    st.sampled_from((1, 2, 4, 16, 64)),
    st.one_of(st.none(), st.integers(0, 1 << 20)),
    st.just("measured"),
)


@given(
    arch=st.sampled_from(("sm_90", "host")),
    new=st.lists(lines, max_size=4, unique_by=lambda one: (one.kind, one.worlds, one.rows)),
)
def test_the_indexers_lines_decide_what_was_measured_and_nothing_else(arch: str, new: list[Crossover]):
    base = shipped(arch)
    table = merge.merged(base, arch, 2, {}, True, ("these", "a test"), (), new)
    assert parse(table.to_json(), "it") == table
    for kind, world, rows in itertools.product(("dsa", "block_max"), range(2, 9), (1, 2, 3, 4, 16, 17, 64, 65)):
        mine = [one for one in new if one.kind == kind and one.worlds == (world, world)]
        known = merge.crossovers_of(base.indexer, kind, world)
        bounds = sorted({one.rows for one in (*mine, *known) if one.rows is not None and one.rows >= rows})
        decides = next((one for one in mine if bounds and one.rows == bounds[0]), None)
        for context in (0, 8192, 1 << 19, 1 << 21):
            now = applies(table, kind, world, context, rows)
            if decides is None:
                assert now == applies(base, kind, world, context, rows)
            else:
                assert now == (decides.context is not None and context >= decides.context)


def test_shapes_are_lines_and_what_is_no_part_of_one_is_added():
    found = cases.of("mono_ffn", {"rows": "1,4", "hidden": "64", "intermediate": "32,48", "projection": "16,32"})
    one = Mono(found, "graph", 2, "cuda", shipped("sm_90"))
    for case in found:
        slow = case.rows == 4 and case.intermediate == 32
        one.duels[case] = Duel(1.0, (0.5 if case.projection == 16 else 1.2) if slow else 2.0, "separate_nccl")
    assert one.lines() == (Pays("mono_ffn", (2, 2), 64, 32, 1), Pays("mono_ffn", (2, 2), 64, 48, 4))
    assert one.verdicts()[0] == "mono_ffn, hidden 64, intermediate 32: one launch up to 1 rows"


def test_steps_of_as_many_rows_are_one_line():
    given_ = {"kind": "dsa", "context": "4096,8192", "requests": "1,4", "query-rows": "1,4"}
    one = Indexing(cases.of("indexer", given_), "graph", 2, "cuda", shipped("sm_90"))
    for case in one.cases:
        long = case.context == 8192
        one.duels[case] = Duel(2.0, 3.0 if long and case.requests == 4 else 2.5 if long else 1.5, "replicated")
    assert [(each.rows, each.context) for each in one.lines()] == [(1, 6144), (4, 5735), (16, 5462)]
    never = Indexing(one.cases[:1], "graph", 2, "cuda", shipped("host"), {one.cases[0]: Duel(2.0, 1.0, "replicated")})
    assert never.verdicts() == ["indexer dsa, 1 rows: ranks share the scoring never: not up to 4096 tokens"]


# ------------------------------------------------------------------ what a user types


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hidden", "4096"], ["--hidden 4096", "all_reduce_norm or mono_ffn"]),
        (["--ops", "mono_ffn", "--to", "4KiB"], ["--to 4KiB", "mono_ffn", "leave it out"]),
        (["--ops", "all_reduce_norm", "--hidden", "100"], ["--hidden 100", "16 bytes", "pad"]),
        (["--ops", "all_reduce_norm", "--rows", "0"], ["--rows 0", "at least 1"]),
        (["--ops", "all_reduce_norm", "--rows", "99999"], ["99999 rows of 4096", "16777216", "fewer rows"]),
        (["--ops", "mono_ffn", "--rows", "49"], ["--rows 49", "48"]),
        (["--ops", "mono_ffn", "--hidden", "60"], ["hidden 60", "multiples of 8"]),
        (["--ops", "mono_ffn", "--grid", "3"], ["--grid 3", "BLOCKSxTHREADS"]),
        (["--ops", "mono_ffn", "--grid", "3x"], ["--grid 3x", "BLOCKSxTHREADS"]),
        (["--ops", "indexer", "--kind", "csa"], ["'csa'", "dsa, block_max"]),
        (["--ops", "indexer", "--context", "9"], ["context of 9", "longer one"]),
        (["--ops", "indexer", "--world", "1"], ["1 rank", "2 at least"]),
        (["--ops", "indexer", "--context", "99999999999"], ["--ops indexer", "MiB of a device", "smaller shape"]),
    ],
)
def test_bad_options_end_with_one_sentence(options: list[str], words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["--target", "host", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("flycomm tune: ")
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words), captured.err


def test_a_dry_run_counts_every_operation(tmp_path, capsys):
    options = ["--ops", "indexer,mono_ffn,all_reduce_norm", "--hidden", "64", "--rows", "1,4", "--context", "4096"]
    assert main(["--target", "host", "--dry-run", "--out", str(tmp_path / "table.json"), *options]) == 0
    shown = capsys.readouterr().out
    for op in ("all_reduce_norm, 2 ranks on host", "mono_ffn, 2 ranks on host", "indexer, 2 ranks on host"):
        assert op in shown
    assert shown.index("all_reduce_norm") < shown.index("mono_ffn") < shown.index("indexer")
    assert ["4", "×", "64"] in [line.split()[:3] for line in shown.splitlines()]
    assert list(tmp_path.iterdir()) == []


def test_show_has_what_pays(capsys):
    report.show_table(shipped("sm_90"), "it came with flycomm")
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["6144", "1024", "16"] in shown
    assert ["4", "196608", "measured"] in shown
