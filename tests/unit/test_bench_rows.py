# SPDX-License-Identifier: Apache-2.0
"""From samples to rows, and from rows to files and back."""

from __future__ import annotations

import json
import math
import shlex
import subprocess

import pytest

from flycomm.bench import origin, rows
from flycomm.bench.floors import Floor, one_shot_floor, two_shot_floor
from flycomm.bench.harness import Outcome
from flycomm.bench.problem import Case
from flycomm.bench.stats import slowest
from flycomm.errors import UsageError

COMMON = {"what": "all_reduce", "target": "host", "device": "a chip", "world": 2, "mode": "eager", "command": "x"}
CASE = Case(2048, "bf16")
RIGHT = Outcome(4.0, 0.5, True, 0.0)


def test_the_median_of_a_rank_and_then_the_slowest_rank():
    timing = slowest([[1.0, 100.0, 2.0], [5.0, 3.0, 4.0], [3.0, 3.0, 3.0]])
    assert (timing.us, timing.skew_us) == (4.0, 2.0)  # medians 2, 4, 3
    assert slowest([[7.0]]).skew_us == 0.0


def test_the_spread_is_the_slowest_ranks_middle_half():
    assert slowest([[1.0, 90.0, 2.0], [10.0, 11.0, 12.0, 13.0, 14.0]]).spread_us == 2.0
    assert slowest([[5.0, 5.0]]).spread_us == 0.0
    assert slowest([[7.0]]).spread_us is None, "one sample says nothing of noise"


def test_a_row_a_baseline():
    baselines = {"nccl": Outcome(12.0, 0.1, True, 0.1), "vllm": None}
    first, second = rows.of_case(COMMON, CASE, "flags", RIGHT, baselines)
    assert list(first) == list(rows.KEYS)
    assert (first["us"], first["skew_us"], first["correct"], first["max_error"]) == (4.0, 0.5, True, 0.0)
    assert (first["baseline"], first["baseline_us"], first["ratio"]) == ("nccl", 12.0, 3.0)
    assert (second["baseline"], second["baseline_us"], second["ratio"]) == ("vllm", None, None)
    assert first["commit"] is None
    assert first["protocol"] == "flags"


def test_one_row_without_a_baseline():
    (row,) = rows.of_case(COMMON, CASE, "flags", RIGHT, {})
    assert (row["baseline"], row["baseline_us"], row["ratio"], row["us"]) == (None, None, None, 4.0)


def test_a_wrong_result_has_no_time_and_no_ratio():
    wrong = Outcome(None, None, False, math.inf)
    (row,) = rows.of_case(COMMON, CASE, "flags", wrong, {"nccl": Outcome(12.0, 0.1, True, 0.1)})
    assert (row["us"], row["ratio"], row["correct"], row["max_error"]) == (None, None, False, None)
    json.loads(json.dumps(row), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_floor_rows_are_named_and_have_no_dtype():
    row = rows.of_floor(COMMON, Floor("flag", 0, 0.69))
    assert (row["what"], row["protocol"], row["us"], row["dtype"], row["correct"]) == (
        "floor",
        "flag",
        0.69,
        None,
        None,
    )


def test_the_one_shot_floor_of_two_h200s():
    assert one_shot_floor(0.95, 0.69, 386e3, 2, 128 << 10) == pytest.approx(1.98, abs=0.01)
    assert one_shot_floor(0.95, 0.69, 386e3, 8, 128 << 10) == pytest.approx(1.64 + 7 * 0.34, abs=0.01)


def test_the_two_shot_floor():
    assert two_shot_floor(0.95, 0.69, 386e3, 8, 1 << 20) == pytest.approx(0.95 + 1.38 + 1.75 * 2.7165, abs=0.001)
    assert two_shot_floor(0.95, 0.69, 386e3, 8, 1 << 20) < one_shot_floor(0.95, 0.69, 386e3, 8, 1 << 20)
    assert two_shot_floor(0.95, 0.69, 386e3, 2, 1 << 20) > one_shot_floor(0.95, 0.69, 386e3, 2, 1 << 20)


def test_rows_are_appended_and_read_back(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    made = rows.of_case(COMMON, CASE, "flags", RIGHT, {})
    rows.append(path, made)
    rows.append(path, made)
    assert rows.load(path) == made * 2


def test_files_of_before_lack_the_newer_keys(tmp_path):
    path = tmp_path / "results.jsonl"
    (row,) = rows.of_case(COMMON, CASE, "flags", RIGHT, {})
    newer = {"reduction", "straggler_us", "spread_us", "enqueue_us", "baseline_spread_us", "baseline_enqueue_us"}
    newer |= {"rows", "hidden", "columns", "k", "exchange_mode", "given"}
    path.write_text(json.dumps({key: value for key, value in row.items() if key not in newer}))
    assert rows.load(path) == [row]


def test_spreads_and_launch_costs_have_keys_of_their_own():
    ours, nccl = Outcome(4.0, 0.5, True, 0.0, 0.25, 6.0), Outcome(12.0, 0.1, True, 0.1, 0.75, 9.0)
    common = COMMON | {"reduction": "max", "straggler_us": 50.0}
    (row,) = rows.of_case(common, CASE, "flags", ours, {"nccl": nccl})
    assert (row["spread_us"], row["enqueue_us"], row["reduction"], row["straggler_us"]) == (0.25, 6.0, "max", 50.0)
    assert (row["baseline_spread_us"], row["baseline_enqueue_us"]) == (0.75, 9.0)
    floor = rows.of_floor(common, Floor("flag", 0, 0.69))
    assert (floor["reduction"], floor["straggler_us"]) == (None, None), "a floor is nobody's in particular"


@pytest.mark.parametrize("line", ["{", "3", '{"what": "all_reduce"}'])
def test_a_file_of_something_else_is_refused(tmp_path, line):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(rows.of_case(COMMON, CASE, "flags", RIGHT, {})[0]) + "\n" + line)
    with pytest.raises(UsageError, match="line 2"):
        rows.load(path)


def test_the_command_can_be_run_again():
    words = shlex.split(
        origin.command(["torchrun", "--nproc-per-node", "2", "-m"], "all_gather", {"bytes": "2KiB", "floors": False})
    )
    assert words[:6] == ["torchrun", "--nproc-per-node", "2", "-m", "flycomm", "bench"]
    assert words[6:] == ["all_gather", "--bytes", "2KiB", "--no-floors"]


def test_the_commit_is_the_checkouts_own_and_says_when_code_differs(tmp_path):
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True)

    (tmp_path / "flycomm").mkdir()
    (tmp_path / "results").mkdir()
    assert origin.commit(tmp_path) is None
    git("init", "-q")
    assert origin.commit(tmp_path) is None
    (tmp_path / "flycomm" / "a.py").write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "a")
    clean = origin.commit(tmp_path)
    assert clean is not None
    assert len(clean) >= 7
    (tmp_path / "results" / "r.jsonl").write_text("{}")
    assert origin.commit(tmp_path) == clean, "results are not code"
    (tmp_path / "flycomm" / "b.py").write_text("2")
    assert origin.commit(tmp_path) == f"{clean}+dirty"
    assert origin.commit(tmp_path / "flycomm") is None, "an installed package lies in somebody else's checkout"
