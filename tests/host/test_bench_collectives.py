# SPDX-License-Identifier: Apache-2.0
"""The benchmark harness on every collective and reduction, with a rank that comes late, and against an earlier run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flycomm import targets
from flycomm.bench import cli, rows, straggler
from flycomm.bench.ours import Flycomm
from tests.launch import torchrun
from tests.ranks import run

QUICK = ("--calls", "4", "--repeats", "2", "--timeout", "20")


def _bench(tmp_path: Path, what: str, *options: str) -> tuple[int, list[rows.Row]]:
    results = tmp_path / "results.jsonl"
    code = cli.main([what, "--target", targets.active().name, *QUICK, "--json", str(results), *options])
    return code, rows.load(results) if results.exists() else []


@pytest.mark.parametrize("what", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(("world", "dtype"), [(1, "f32"), (3, "bf16"), (8, "f16")])
def test_bytes_are_a_shards(tmp_path, capsys, what, world, dtype):
    code, found = _bench(tmp_path, what, "--world", str(world), "--bytes", "20,4100", "--dtype", dtype, "--no-floors")
    assert code == 0
    assert [(row["what"], row["bytes"], row["correct"]) for row in found] == [(what, 20, True), (what, 4100, True)]
    assert all(row["us"] > 0 for row in found)
    assert all(row["reduction"] == (None if what == "all_gather" else "sum") for row in found)
    assert found[0]["command"].startswith(f"python -m flycomm bench {what} --world {world} --target")
    assert "shard" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("reduction", ["avg", "max", "min"])
def test_reductions(tmp_path, what, reduction):
    options = ("--world", "3", "--bytes", "2KiB", "--dtype", "bf16,f32", "--reduction", reduction, "--no-floors")
    code, found = _bench(tmp_path, what, *options)
    assert code == 0
    assert [(row["reduction"], row["correct"]) for row in found] == [(reduction, True)] * 2
    assert f"--reduction {reduction}" in found[0]["command"]


@pytest.mark.parametrize("what", ["all_gather", "reduce_scatter"])
def test_one_wrong_bit_is_found(tmp_path, monkeypatch, what):
    right = Flycomm.call

    def wrong(self, index: int) -> torch.Tensor:
        result = right(self, index)
        if index == 2 and self._comm.rank == 1:
            result.view(torch.int16)[-1] ^= 1
        return result

    monkeypatch.setattr(Flycomm, "call", wrong)
    code, (row,) = _bench(tmp_path, what, "--bytes", "2KiB", "--no-floors")
    assert code == 1
    assert (row["correct"], row["us"]) == (False, None)


def test_a_gather_of_the_ranks_in_another_order_is_wrong(tmp_path, monkeypatch):
    right = Flycomm.call
    monkeypatch.setattr(Flycomm, "call", lambda self, index: right(self, index).view(2, -1).flip(0).reshape(-1))
    code, (row,) = _bench(tmp_path, "all_gather", "--world", "2", "--bytes", "2KiB", "--no-floors")
    assert code == 1
    assert row["correct"] is False


@pytest.mark.parametrize("what", ["all_gather", "reduce_scatter"])
def test_floors_of_a_shard(tmp_path, what):
    code, found = _bench(tmp_path, what, "--world", "3", "--bytes", "64KiB", "--floors")
    assert code == 0
    times = {row["protocol"]: row for row in found if row["what"] == "floor"}
    assert set(times) == {"empty", "flag", "copy", "one_shot"}, "a shard goes to everybody in one shot"
    copied = 2 * 65536 / (times["copy"]["bytes"] / times["copy"]["us"])
    assert times["one_shot"]["us"] == pytest.approx(times["empty"]["us"] + times["flag"]["us"] + copied, abs=0.01)


def test_under_torchrun(tmp_path):
    target = targets.active().name
    if target != "host":
        pytest.skip("the backends of GPUs have benchmarks of their own")
    for what in ("all_gather", "reduce_scatter"):
        results = tmp_path / f"{what}.jsonl"
        options = ("--target", target, "--bytes", "2KiB", "--against", "all", *QUICK, "--json", str(results))
        done = torchrun(f"benchmarks/{what}.py", 2, *options)
        assert done.returncode == 0, done.stderr
        (row,) = [json.loads(line) for line in results.read_text().splitlines()]
        assert (row["what"], row["baseline"], row["correct"]) == (what, "gloo", True)
        assert row["baseline_us"] > 0
        assert row["baseline_enqueue_us"] > 0
        assert row["baseline_spread_us"] is not None


@pytest.mark.parametrize("what", ["all_reduce", "all_gather", "reduce_scatter"])
def test_the_call_that_is_timed_for_the_cpu_is_the_torch_op_and_gives_the_same(tmp_path, monkeypatch, what):
    right, seen = Flycomm.enqueue, []

    def enqueue(self, index: int) -> object:
        expected = self.call(index).clone()
        self._outputs[index].fill_(float("nan"))
        with monkeypatch.context() as patch:
            patch.setattr(Flycomm, "call", None)
            result = right(self, index)
        seen.append(torch.equal(self._outputs[index], expected))
        return result

    monkeypatch.setattr(Flycomm, "enqueue", enqueue)
    code, _ = _bench(tmp_path, what, "--world", "1", "--bytes", "2KiB", "--no-floors")
    assert code == 0
    assert seen == [True] * 8


# ---------------------------------------------------------------------- a straggler


def test_the_delay_lasts_as_long_as_it_was_asked_for():
    def body(comm) -> float:
        world = SimpleNamespace(size=1, rank=0, device=comm.device.index or 0, barrier=comm.barrier)
        context: Any = SimpleNamespace(world=world, target=targets.active(), device=comm.device)
        straggler.prepare(context)
        call = straggler.delaying(
            context, 3000.0, lambda index: context.target.runtime.synchronize(context.world.device)
        )
        start = time.perf_counter()
        call(0)
        return (time.perf_counter() - start) * 1e6

    assert all(us >= 2999.0 for us in run(1, body))


def test_no_call_is_over_before_the_late_rank_has_come(tmp_path):
    code, (row,) = _bench(tmp_path, "all_reduce", "--world", "3", "--bytes", "2KiB", "--skew-us", "1500")
    assert code == 0
    assert (row["straggler_us"], row["correct"]) == (1500.0, True)
    assert row["us"] >= 1499.0, "the slowest rank waits for the late one, or is it; nothing is subtracted"
    assert row["enqueue_us"] > 0
    assert "--skew-us 1500" in row["command"]


# ---------------------------------------------------------------------- against an earlier run


def test_a_run_is_compared_with_the_file_that_it_appends_to(tmp_path, capsys):
    options = ("--world", "2", "--no-floors", "--compare", str(tmp_path / "results.jsonl"))
    code, _ = _bench(tmp_path, "all_gather", "--world", "2", "--bytes", "2KiB,4KiB", "--no-floors")
    assert code == 0
    capsys.readouterr()
    code, _ = _bench(tmp_path, "all_gather", "--bytes", "4KiB", *options)
    out = capsys.readouterr().out
    assert code == 0, "the other size is not of this run"
    assert "all_gather against" in out
    assert "missing" not in out
    code, _ = _bench(tmp_path, "all_gather", "--bytes", "8KiB", *options)
    assert code == 1
    assert "1 time is missing in the old file" in capsys.readouterr().out
