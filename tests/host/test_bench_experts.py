# SPDX-License-Identifier: Apache-2.0
"""The benchmark harness on the experts' sum: what it reports, that a wrong bit is found, and a process a rank."""

from __future__ import annotations

import json

import pytest
import torch

from flycomm import targets
from flycomm.bench import cli, rows
from flycomm.bench.subjects.experts import NAME, FlycommExperts
from tests.launch import torchrun

QUICK = ("--calls", "4", "--repeats", "2", "--timeout", "20")


def _bench(tmp_path, *options):
    results = tmp_path / "results.jsonl"
    code = cli.main([NAME, "--target", targets.active().name, *QUICK, "--no-floors", "--json", str(results), *options])
    return code, rows.load(results) if results.exists() else []


def test_sizes(tmp_path, capsys):
    code, found = _bench(tmp_path, "--rows", "3", "--hidden", "64,100", "--k", "2", "--world", "2")
    assert code == 0
    assert [(row["bytes"], row["rows"], row["hidden"], row["k"]) for row in found] == [
        (3 * hidden * 2, 3, hidden, 2) for hidden in (64, 100)
    ]
    assert {(row["baseline"], row["correct"], row["baseline_us"] > 0) for row in found} == {
        ("flycomm_apart", True, True)
    }
    assert [row["protocol"] == "separate" for row in found] == [False, True]
    assert "--rows 3 --hidden 64,100 --k 2" in found[0]["command"]
    assert "3 × 100, k 2" in capsys.readouterr().out


@pytest.mark.parametrize("place", [0, 1])
def test_a_wrong_bit_is_found(tmp_path, monkeypatch, place):
    right = FlycommExperts.call

    def wrong(self, index: int) -> tuple[torch.Tensor, ...]:
        result = right(self, index)
        if index == 2:
            result[place].view(torch.int16).view(-1)[-1] ^= 1 if place else 2  # normed may be off by one
        return result

    monkeypatch.setattr(FlycommExperts, "call", wrong)
    options = ("--rows", "2", "--hidden", "64", "--k", "2", "--world", "1", "--against", "none")
    code, (row,) = _bench(tmp_path, *options)
    assert (code, row["correct"], row["us"]) == (1, False, None)


@pytest.mark.full
def test_against_the_groups_own_backend(tmp_path):
    if targets.active().name != "host":
        pytest.skip("the backends of GPUs have benchmarks of their own")
    results = tmp_path / "results.jsonl"
    sizes = ("--rows", "2", "--hidden", "64", "--k", "3", "--target", "host", "--against", "gloo_experts")
    done = torchrun(f"benchmarks/{NAME}.py", 2, *sizes, *QUICK, "--json", str(results))
    assert done.returncode == 0, done.stderr
    (row,) = [json.loads(line) for line in results.read_text().splitlines()]
    assert (row["what"], row["baseline"], row["correct"]) == (NAME, "gloo_experts", True)
    assert row["baseline_us"] > 0, done.stdout
