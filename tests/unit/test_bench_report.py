# SPDX-License-Identifier: Apache-2.0
"""Tables and plots from rows alone: no rank is started."""

from __future__ import annotations

import pytest

from flycomm.bench import cli, plot, report, rows
from flycomm.bench.floors import Floor
from flycomm.bench.harness import Outcome
from flycomm.bench.problem import Case
from flycomm.errors import UsageError

COMMON = {"what": "all_reduce", "target": "cuda", "device": "a chip", "world": 2, "mode": "graph", "command": "x"}


def _rows() -> list[rows.Row]:
    made = []
    for number, num_bytes in enumerate((2048, 8192, 1 << 20)):
        ours = Outcome(4.0 + number, 0.25, True, 0.0)
        others = {"nccl": Outcome(12.0, 0.1, True, 0.1), "vllm": None}
        made += rows.of_case(COMMON, Case(num_bytes, "bf16"), "flags", ours, others)
        made.append(rows.of_floor(COMMON, Floor("one_shot", num_bytes, 1.5 + number)))
    made += [rows.of_floor(COMMON, Floor("flag", 0, 0.69)), rows.of_floor(COMMON, Floor("copy", 64 << 20, 174.0))]
    return made


def test_a_line_a_case_and_a_column_a_baseline():
    (title, columns, lines), (floors_title, _, floors) = report.tables(_rows())
    assert "2 ranks on cuda (a chip), graph" in title
    assert columns == ["message", "dtype", "protocol", "result", "flycomm", "skew", "nccl", "vllm", "floor"]
    assert lines[0] == ["2 KiB", "bf16", "flags", "ok", "4.00", "0.25", "12.00 (3.00×)", "–", "1.50"]
    assert [line[0] for line in lines] == ["2 KiB", "8 KiB", "1 MiB"]
    assert floors_title.startswith("floors, 2 ranks")
    assert ["copy", "64 MiB", "174.00", "386 GB/s"] in [line[:4] for line in floors]
    assert ["flag", "–", "0.69"] in [line[:3] for line in floors]


def test_runs_of_different_worlds_are_different_tables():
    other = rows.of_case({**COMMON, "world": 4}, Case(2048, "bf16"), "flags", Outcome(5.0, 0.1, True, 0.0), {})
    titles = [title for title, _, _ in report.tables(_rows() + other)]
    assert len(titles) == 3
    assert "4 ranks" in titles[1]


def test_other_collectives_reductions_streams_and_stragglers_are_other_tables_and_panels():
    ours, case = Outcome(5.0, 0.1, True, 0.0), Case(2048, "bf16")
    kinds: list[dict] = [
        {"what": "all_gather"},
        {"what": "reduce_scatter", "reduction": "sum"},
        {"reduction": "max"},
        {"replay_on": "default"},
        {"straggler_us": 50.0},
    ]
    found = _rows() + [row for kind in kinds for row in rows.of_case({**COMMON, **kind}, case, "flags", ours, {})]
    *cases, (floors_title, _, _) = report.tables(found)
    assert [title.partition(":")[0] for title, _, _ in cases] == [
        "all_reduce, 2 ranks on cuda (a chip), graph",
        "all_gather, 2 ranks on cuda (a chip), graph",
        "reduce_scatter, 2 ranks on cuda (a chip), graph",
        "all_reduce max, 2 ranks on cuda (a chip), graph",
        "all_reduce, 2 ranks on cuda (a chip), graph on torch's default stream",
        "all_reduce, 2 ranks on cuda (a chip), graph, one rank 50 µs late",
    ]
    assert floors_title.startswith("floors")
    assert [columns[0] for _, columns, _ in cases[:3]] == ["message", "shard", "shard"]
    with_floor = [columns[-1] == "floor" for _, columns, _ in cases]
    assert with_floor == [True] * 5 + [False], "no floor knows of a straggler"
    panels = plot._panels(found)
    assert len(panels) == 6
    assert "all_gather, bf16, graph: 2 ranks, cuda (a chip)" in panels
    assert [len(plot.lines(group)) for group in panels.values()] == [3, 2, 2, 2, 2, 1]


def test_the_lower_floor_counts_and_two_shots_are_an_all_reduces():
    two_shot = rows.of_floor(COMMON, Floor("two_shot", 1 << 20, 2.75))
    gathered = rows.of_case(
        {**COMMON, "what": "all_gather"}, Case(1 << 20, "bf16"), "flags", Outcome(9.0, 0.1, True, 0.0), {}
    )
    (_, _, lines), (_, _, gather_lines), _ = report.tables([*_rows(), two_shot, *gathered])
    assert [line[-1] for line in lines] == ["1.50", "2.50", "2.75"]
    assert [line[-1] for line in gather_lines] == ["3.50"]


def test_what_it_costs_to_enqueue_is_shown_where_it_was_measured():
    eager = {**COMMON, "mode": "eager"}
    ours, nccl = Outcome(9.0, 0.1, True, 0.0, 0.2, 8.5), Outcome(18.0, 0.1, True, 0.0, 0.2, 17.25)
    ((_, columns, lines),) = report.tables(rows.of_case(eager, Case(2048, "bf16"), "flags", ours, {"nccl": nccl}))
    assert columns[4:] == ["flycomm", "skew", "enqueue", "nccl"]
    assert lines[0][4:] == ["9.00", "0.10", "8.50", "18.00 (2.00×), enqueue 17.25"]
    assert "enqueue" not in report.tables(_rows())[0][1]


def test_the_newest_of_two_runs_counts():
    newer = rows.of_case(COMMON, Case(2048, "bf16"), "packets", Outcome(3.0, 0.1, True, 0.0), {})
    lines = report.tables(_rows() + newer)[0][2]
    assert lines[0][2:5] == ["packets", "ok", "3.00"]


def test_a_wrong_result_cannot_be_overlooked():
    wrong = rows.of_case(COMMON, Case(2048, "bf16"), "flags", Outcome(None, None, False, 3.0), {})
    (_, _, lines), *_ = report.tables(wrong)
    assert lines[0][3:6] == ["WRONG", "–", "–"]


def test_what_is_drawn():
    drawn = plot.lines(_rows())
    assert list(drawn) == ["flycomm", "nccl", "floor (launch + link + bytes)"]  # vllm has no time
    assert drawn["flycomm"] == {2048: 4.0, 8192: 5.0, 1 << 20: 6.0}
    assert drawn["nccl"] == {2048: 12.0, 8192: 12.0, 1 << 20: 12.0}


def test_a_plot_from_a_results_file(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    results, picture = tmp_path / "results.jsonl", tmp_path / "new" / "latency.png"
    rows.append(results, _rows())
    assert cli.main(["all_reduce", "--from", str(results), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "12.00 (3.00×)" in out
    assert str(picture) in out


def test_a_plot_says_what_its_axes_are(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "latency.svg"
    with pytest.MonkeyPatch.context() as patch:
        import matplotlib

        patch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text stays text
        plot.save(_rows(), picture)
    drawn = picture.read_text()
    for text in ("2 KiB", "1 MiB", "µs", "nccl", "flycomm", "floor (launch", "all_reduce, bf16, graph: 2 ranks, cuda"):
        assert text in drawn, text


def test_nothing_to_draw_is_an_error(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match="no timed result"):
        plot.save([rows.of_floor(COMMON, Floor("flag", 0, 0.69))], tmp_path / "latency.png")


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(monkeypatch, capsys):
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert cli.main(["all_reduce", "--target", "host", "--plot", "x.png"]) == 2
    assert "flycomm[bench]" in capsys.readouterr().err


@pytest.mark.parametrize(("low", "high"), [(1.5, 20.0), (3.0, 3.1), (2.0, 900.0), (60.0, 500000.0)])
def test_ticks_are_few_and_reach_as_far_as_the_values(low, high):
    ticks = plot._ticks([low, high])
    assert 1 <= len(ticks) <= 14
    assert low / 3 <= ticks[0]
    assert ticks[-1] <= 3 * high
