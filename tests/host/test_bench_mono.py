# SPDX-License-Identifier: Apache-2.0
"""The benchmark harness on the mono layer: virtual ranks, processes with a baseline, and results that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flycomm import targets
from flycomm.bench import cli, labels, rows
from flycomm.bench.problem import BUFFERS, Case
from flycomm.bench.subjects import mono
from tests.launch import torchrun

QUICK = ("--calls", "4", "--repeats", "1", "--timeout", "20")
SMALL = ("--hidden", "64", "--intermediate", "32", "--projection", "16", *QUICK)


def _bench(tmp_path: Path, *options: str) -> tuple[int, list[rows.Row]]:
    results = tmp_path / "results.jsonl"
    code = cli.main(["mono_ffn", "--target", targets.active().name, *SMALL, "--json", str(results), *options])
    return code, rows.load(results) if results.exists() else []


def test_a_layer_beside_separate_kernels(tmp_path, capsys):
    code, (row,) = _bench(tmp_path, "--rows", "1", "--world", "2", "--grid", "3x64")
    assert code == 0
    assert (row["rows"], row["hidden"], row["intermediate"], row["grid"]) == (1, 64, 32, "3x64")
    assert (row["baseline"], row["correct"], row["protocol"]) == ("separate_flycomm", True, "packets 3x64")
    assert row["rate_gb_s"] == pytest.approx(2 * 64 * (3 * 32 + 16) / row["us"] / 1000, abs=0.1)
    assert row["baseline_us"] > 0
    assert "--rows 1 --hidden 64 --intermediate 32 --projection 16 --grid 3x64" in row["command"]
    assert "1 × 64, intermediate 32, projection 16, 3x64" in capsys.readouterr().out
    assert labels.size(row) == "1 × 64, intermediate 32, projection 16, 3x64"


@pytest.mark.full
def test_many_rows_and_how_they_are_multiplied(tmp_path):
    options = ("--world", "2", "--against", "none")
    code, (row,) = _bench(tmp_path, "--rows", "9", "--grid", "2x64/dot", *options)
    assert (code, row["correct"], row["grid"]) == (0, True, "2x64/dot")
    code, (_, row) = _bench(tmp_path, "--rows", "33", *options)
    assert (code, row["correct"], row["rows"]) == (0, True, 33)


@pytest.mark.full
def test_against_the_groups_own_backend(tmp_path):
    target = targets.active().name
    if target != "host":
        pytest.skip("the backends of GPUs have benchmarks of their own")
    results = tmp_path / "results.jsonl"
    options = (*SMALL, "--rows", "2", "--target", target, "--against", "separate_gloo", "--json", str(results))
    done = torchrun("benchmarks/mono_ffn.py", 2, *options)
    assert done.returncode == 0, done.stderr
    (row,) = [json.loads(line) for line in results.read_text().splitlines()]
    assert (row["baseline"], row["correct"]) == ("separate_gloo", True)
    assert row["baseline_us"] > 0, done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--dtype", "f32"), "is not bf16"),
        (("--rows", "49"), "over the 48"),
        (("--grid", "3"), "is not BLOCKSxTHREADS"),
        (("--grid", "3x64/sum"), "one of auto, dot, matrix"),
        (("--columns", "8"), "means nothing to mono_ffn"),
    ],
)
def test_what_a_layer_cannot_be_is_refused(tmp_path, capsys, options, said):
    code, found = _bench(tmp_path, "--world", "1", *options)
    assert (code, found) == (2, [])
    assert said in capsys.readouterr().err


def _problem() -> tuple[mono.MonoProblem, list[torch.Tensor]]:
    """With a result of buffer 0 as torch makes it, one rank's partial sums rounded as a baseline's are."""
    context = SimpleNamespace(world=SimpleNamespace(size=2, rank=1), device=torch.device("cpu"))
    problem = mono.MonoProblem(context, Case(0, "bf16", rows=3, hidden=64, intermediate=32, projection=16))
    return problem, [one.bfloat16() for one in problem._expected[0]]


def test_rounded_results_are_right_and_others_are_not():
    problem, right = _problem()
    assert len(problem.inputs) == BUFFERS
    assert problem.judge({0: tuple(right)}, exact=True).correct
    out, residual = right
    wrong = [
        (out * 1.05, residual),
        (out, residual + problem.inputs[0].residual),
        (out.flip(0), residual.flip(0)),
        (out, residual * float("nan")),
    ]
    for one in wrong:
        assert not problem.judge({0: one}, exact=False).correct
