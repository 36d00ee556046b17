# SPDX-License-Identifier: Apache-2.0
"""Two runs side by side, from rows alone: what is compared, what noise is, and what is missing."""

from __future__ import annotations

from typing import Any

import pytest

from flycomm.bench import cli, compare, rows
from flycomm.bench.floors import Floor
from flycomm.bench.harness import Outcome
from flycomm.bench.problem import Case

COMMON: dict[str, Any] = {
    "what": "all_reduce",
    "reduction": "sum",
    "target": "cuda",
    "device": "a chip",
    "world": 2,
    "mode": "graph",
    "replay_on": "own",
    "command": "x",
}


def _rows(us: float, spread: float | None = 0.0, size: int = 2048, nccl: float | None = None, **other: Any) -> list:
    baselines = {} if nccl is None else {"nccl": Outcome(nccl, 0.0, True, 0.0, spread)}
    ours = Outcome(us, 0.0, True, 0.0, spread)
    return rows.of_case({**COMMON, **other}, Case(size, "bf16"), "flags", ours, baselines)


def _verdict(old: list, new: list) -> str:
    (line,) = compare.compare(old, new, whole=True).lines
    return line.verdict


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (_rows(10.0), _rows(10.29), "same"),  # 3 %, though neither has a spread
        (_rows(10.0), _rows(10.31), "slower"),
        (_rows(10.0), _rows(9.69), "faster"),
        (_rows(10.0, 0.5), _rows(11.0, 0.6), "same"),  # the spreads are added
        (_rows(10.0, 0.5), _rows(11.0, 0.4), "slower"),
        (_rows(10.0, 0.5), _rows(8.8, 0.6), "faster"),
        (_rows(10.0, None), _rows(10.4), "same"),  # 5 % where one has no spread
        (_rows(10.0, None), _rows(10.6), "slower"),
        (_rows(10.0), _rows(10.4, None), "same"),
    ],
)
def test_a_difference_counts_where_it_is_more_than_the_noise(old, new, verdict):
    assert _verdict(old, new) == verdict


@pytest.mark.parametrize(
    "other",
    [
        {"what": "all_gather", "reduction": None},
        {"reduction": "max"},
        {"target": "rocm"},
        {"world": 4},
        {"mode": "eager"},
        {"replay_on": "default"},
        {"straggler_us": 50.0},
        {"size": 4096},
    ],
)
def test_only_what_is_alike_is_compared(other):
    found = compare.compare(_rows(4.0), _rows(4.0, **other), whole=True)
    assert found.lines == ()
    assert [sentence.partition(",")[0] for sentence in found.missing] == [
        "1 time is missing in this run",
        "1 time is missing in the old file",
    ]


def test_another_device_or_protocol_or_commit_is_compared_and_said():
    (line,) = compare.compare(_rows(4.0), _rows(4.0, device="b chip", commit="abc"), whole=True).lines
    ((title, _, _),) = compare.tables(compare.Comparison((line,), ()), "old.jsonl")
    assert title == "all_reduce against old.jsonl: 2 ranks on cuda (a chip then b chip), graph"


def test_contenders_and_floors_are_compared_by_name():
    old = [*_rows(4.0, nccl=12.0), rows.of_floor(COMMON, Floor("flag", 0, 0.69))]
    new = [*_rows(3.0, nccl=12.1), rows.of_floor(COMMON, Floor("flag", 0, 0.80))]
    found = compare.compare(old, new, whole=True)
    said = {(line.key.what, line.key.contender): line.verdict for line in found.lines}
    assert said == {("all_reduce", "flycomm"): "faster", ("all_reduce", "nccl"): "same", ("floor", "flag"): "slower"}
    (_, columns, lines), (floors, _, _) = compare.tables(found, "old.jsonl")
    assert columns == ["bytes", "dtype", "contender", "old µs", "new µs", "noise", "new / old", "verdict"]
    assert lines[0] == ["2 KiB", "bf16", "flycomm", "4.00", "3.00", "± 0.12", "0.750", "faster"]
    assert floors.startswith("floor against")


def test_the_later_of_two_rows_counts_and_one_without_a_time_is_none():
    (line,) = compare.compare(_rows(9.0) + _rows(4.0), _rows(4.0), whole=True).lines
    assert line.old.us == 4.0
    failed = _rows(4.0, nccl=12.0)
    failed[0]["baseline_us"] = None
    found = compare.compare(_rows(4.0, nccl=12.0), _rows(4.0, nccl=12.0) + failed, whole=False)
    assert [line.key.contender for line in found.lines] == ["flycomm"]
    (sentence,) = found.missing
    assert sentence == (
        "1 time is missing in this run, so nothing can be said of: all_reduce, nccl, 2 KiB, bf16, 2 ranks, graph"
    )


def test_a_run_of_less_is_not_asked_for_the_rest_and_a_file_is():
    old = [row for size in (2048, 4096, 8192, 16384, 32768) for row in _rows(4.0, size=size, nccl=12.0)]
    assert compare.compare(old, _rows(4.0), whole=False).missing == ()
    (sentence,) = compare.compare(old, _rows(4.0), whole=True).missing
    assert sentence.startswith("9 times are missing in this run")
    assert sentence.endswith("; and 6 more")


def test_rows_from_before_reductions_are_sums():
    old = _rows(4.0)
    old[0]["reduction"] = None
    assert _verdict(old, _rows(4.0)) == "same"


@pytest.mark.parametrize(("us", "code"), [(4.0, 0), (400.0, 0), (None, 1)])
def test_times_never_decide_the_exit_code_and_a_missing_row_does(tmp_path, capsys, us, code):
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    rows.append(old, _rows(4.0))
    rows.append(new, _rows(us or 4.0, size=2048 if us else 4096))
    assert cli.main(["all_reduce", "--from", str(new), "--compare", str(old)]) == code
    out = capsys.readouterr().out
    assert ("slower" in out) == (us == 400.0)
    assert ("missing in this run" in out) == (code == 1)
