# SPDX-License-Identifier: Apache-2.0
"""From samples to rows, and from rows to files and back."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from flycomm import targets
from flycomm.bench import rows
from flycomm.bench.floors import Floor, one_shot_floor
from flycomm.bench.harness import Case, Outcome
from flycomm.bench.run import budget
from flycomm.bench.stats import slowest
from flycomm.errors import UsageError
from flycomm.geometry import LARGEST_CLASS, size_class
from flycomm.layout import plan_layout

COMMON = {"what": "all_reduce", "target": "host", "device": "a chip", "world": 2, "mode": "eager", "command": "x"}
CASE = Case(2048, "bf16")
RIGHT = Outcome(4.0, 0.5, True, 0.0)


def test_the_median_of_a_rank_and_then_the_slowest_rank():
    timing = slowest([[1.0, 100.0, 2.0], [5.0, 3.0, 4.0], [3.0, 3.0, 3.0]])
    assert (timing.us, timing.skew_us) == (4.0, 2.0)  # medians 2, 4, 3
    assert slowest([[7.0]]).skew_us == 0.0


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


@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize("largest", [2048, 100_000, 4 << 20, 20 << 20])
def test_the_budget_gives_every_message_a_channel_of_its_class(world, largest):
    ranks: Any = SimpleNamespace(size=world, device=0)
    num_bytes = budget(targets.get("host"), ranks, largest)
    assert num_bytes >= largest
    layout = plan_layout("host", world, num_bytes, 1, False)
    assert layout.largest_class >= min(size_class(largest), LARGEST_CLASS)


def test_rows_are_appended_and_read_back(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    made = rows.of_case(COMMON, CASE, "flags", RIGHT, {})
    rows.append(path, made)
    rows.append(path, made)
    assert rows.load(path) == made * 2


@pytest.mark.parametrize("line", ["{", "3", '{"what": "all_reduce"}'])
def test_a_file_of_something_else_is_refused(tmp_path, line):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(rows.of_case(COMMON, CASE, "flags", RIGHT, {})[0]) + "\n" + line)
    with pytest.raises(UsageError, match="line 2"):
        rows.load(path)


def test_the_command_can_be_run_again():
    words = shlex.split(rows.command(["torchrun", "--nproc-per-node", "2", "-m"], {"bytes": "2KiB", "floors": False}))
    assert words[:6] == ["torchrun", "--nproc-per-node", "2", "-m", "flycomm", "bench"]
    assert words[6:] == ["all_reduce", "--bytes", "2KiB", "--no-floors"]


def test_the_commit_is_the_checkouts_own_and_says_when_code_differs(tmp_path):
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True)

    (tmp_path / "flycomm").mkdir()
    (tmp_path / "results").mkdir()
    assert rows.commit(tmp_path) is None
    git("init", "-q")
    assert rows.commit(tmp_path) is None
    (tmp_path / "flycomm" / "a.py").write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "a")
    clean = rows.commit(tmp_path)
    assert clean is not None
    assert len(clean) >= 7
    (tmp_path / "results" / "r.jsonl").write_text("{}")
    assert rows.commit(tmp_path) == clean, "results are not code"
    (tmp_path / "flycomm" / "b.py").write_text("2")
    assert rows.commit(tmp_path) == f"{clean}+dirty"
    assert rows.commit(tmp_path / "flycomm") is None, "an installed package lies in somebody else's checkout"
