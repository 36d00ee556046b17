# SPDX-License-Identifier: Apache-2.0
"""The benchmark harness on an indexer: virtual ranks, processes with torch's exchange, and results that are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flycomm import targets
from flycomm.bench import cli, rows
from flycomm.bench.subjects.indexer import FlycommIndexer
from tests.launch import torchrun

QUICK = ("--calls", "4", "--repeats", "1", "--timeout", "20")
TOKENS = ("--kind", "dsa", "--context", "150", "--requests", "1", "--query-rows", "2", "--heads", "16", "--k", "8")
BLOCKS = ("--kind", "block_max", "--context", "400", "--requests", "1", "--query-rows", "2", "--heads", "2", "--k", "2")


def _bench(tmp_path: Path, *options: str) -> tuple[int, list[rows.Row]]:
    results = tmp_path / "results.jsonl"
    code = cli.main(["indexer", "--target", targets.active().name, *QUICK, "--json", str(results), *options])
    return code, rows.load(results) if results.exists() else []


def test_shared_beside_replicated(tmp_path, capsys):
    code, found = _bench(tmp_path, *TOKENS, "--world", "2")
    assert code == 0
    assert [row["baseline"] for row in found] == ["replicated", "replicated_scores", "no_exchange"]
    row = found[0]
    assert (row["kind"], row["context"], row["requests"], row["query_rows"]) == ("dsa", 150, 1, 2)
    assert (row["dtype"], row["heads"], row["k"], row["bytes"]) == ("e4m3fn", 16, 8, 3 * 64 * 132)
    assert {(one["correct"], one["protocol"], one["baseline_us"] > 0) for one in found} == {(True, "topk_64", True)}
    assert row["rate_gb_s"] == pytest.approx(2 * 64 * 132 / row["us"] / 1000, abs=0.1)
    said = "--format e4m3fn --k 8 --kind dsa --context 150 --requests 1 --query-rows 2 --heads 16"
    assert said in row["command"]
    assert "dsa, 1 × 2 rows, heads 16, k 8, 150 tokens" in capsys.readouterr().out


@pytest.mark.full
def test_against_the_groups_own_backend(tmp_path):
    target = targets.active().name
    if target != "host":
        pytest.skip("the backends of GPUs have benchmarks of their own")
    results = tmp_path / "results.jsonl"
    options = (*BLOCKS, "--format", "bf16", *QUICK, "--target", target, "--json", str(results))
    done = torchrun("benchmarks/indexer.py", 2, *options, "--against", "cp_gloo_torch")
    assert done.returncode == 0, done.stderr
    (row,) = [json.loads(line) for line in results.read_text().splitlines()]
    assert (row["baseline"], row["correct"], row["protocol"]) == ("cp_gloo_torch", True, "topk_owner_64")
    assert row["baseline_us"] > 0, done.stdout


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("format", ["bf16", "e4m3fn", "e2m1"])
def test_blocks_of_several_requests(tmp_path, world, format):
    code, found = _bench(tmp_path, *BLOCKS, "--requests", "2", "--format", format, "--world", str(world))
    assert code == 0
    assert {(row["correct"], row["baseline_us"] > 0) for row in found} == {(True, True)}
    assert {row["protocol"] for row in found} == {"alone" if world == 1 else "topk_owner_64"}


def test_one_wrong_bit_of_any_tensor_is_found(tmp_path, monkeypatch):
    right = FlycommIndexer.call
    for place in range(3):

        def wrong(self, index: int, place: int = place) -> tuple[torch.Tensor, ...]:
            result = right(self, index)
            if index == 2:
                result[place].view(torch.int32).view(-1)[-1] ^= 1
            return result

        monkeypatch.setattr(FlycommIndexer, "call", wrong)
        folder = tmp_path / str(place)
        folder.mkdir()
        code, (row,) = _bench(folder, *TOKENS, "--world", "1", "--against", "none")
        assert (code, row["correct"], row["us"]) == (1, False, None), place
