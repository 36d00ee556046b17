# SPDX-License-Identifier: Apache-2.0
"""The benchmark harness on the fused norm, the top-k and the exchange: virtual ranks, and processes with a baseline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flycomm import tables, targets
from flycomm.bench import cli, rows
from flycomm.bench.subjects.exchange import FlycommExchange
from flycomm.bench.subjects.norm import FlycommNorm
from flycomm.bench.subjects.topk import FlycommTopk
from tests.launch import torchrun

QUICK = ("--calls", "4", "--repeats", "2", "--timeout", "20")
SMALL = {  # the least of each, and what of it runs on virtual ranks
    "all_reduce_norm": ("--rows", "2", "--hidden", "64"),
    "topk": ("--rows", "2", "--columns", "200", "--k", "5"),
    "topk_exchange": ("--rows", "2", "--columns", "100", "--k", "5"),
}
OURS = {"all_reduce_norm": FlycommNorm, "topk": FlycommTopk, "topk_exchange": FlycommExchange}


def _bench(tmp_path: Path, what: str, *options: str) -> tuple[int, list[rows.Row]]:
    results = tmp_path / "results.jsonl"
    code = cli.main([what, "--target", targets.active().name, *QUICK, "--json", str(results), *options])
    return code, rows.load(results) if results.exists() else []


@pytest.mark.parametrize(("world", "dtype"), [(1, "f32"), (3, "bf16")])
def test_a_norm_of_several_sizes(tmp_path, capsys, world, dtype):
    options = ("--rows", "1,3", "--hidden", "64,100", "--dtype", dtype, "--world", str(world), "--no-floors")
    code, found = _bench(tmp_path, "all_reduce_norm", *options)
    assert code == 0
    size = 4 if dtype == "f32" else 2
    assert [(row["bytes"], row["rows"], row["hidden"]) for row in found] == [
        (rows * hidden * size, rows, hidden) for rows in (1, 3) for hidden in (64, 100)
    ]
    assert {(row["baseline"], row["correct"], row["baseline_us"] > 0) for row in found} == {
        ("flycomm_separate", True, True)
    }
    whole = [row["hidden"] * size % 16 == 0 for row in found]
    assert [row["protocol"] != "separate" for row in found] == whole, "the kernel takes whole 16 bytes"
    assert found[0]["command"].startswith(f"python -m flycomm bench all_reduce_norm --world {world} --target")
    assert "--rows 1,3 --hidden 64,100" in found[0]["command"]
    assert "3 × 100" in capsys.readouterr().out


def test_a_table_of_ones_own(tmp_path):
    """What it forces is measured, and the command says so."""
    arch = targets.active().capabilities(0).arch
    shipped = tables.shipped(arch)
    row = tables.Row(tables.FUSED[0], (1, 8), "any", 4096, "packets", 1, 64, 4096)
    path = tmp_path / "table.json"
    kept = tuple(one for one in shipped.rows if one.op not in tables.FUSED)
    path.write_text(replace(shipped, arch=arch, rows=(*kept, row)).to_json())
    options = ("--table", str(path), "--no-floors", "--against", "none")
    code, found = _bench(tmp_path, "all_reduce_norm", *SMALL["all_reduce_norm"], *options)
    assert code == 0
    assert [row["protocol"] for row in found] == ["packets"]
    assert f"--table {path}" in found[0]["command"]


def test_floors_of_a_norm_are_its_messages(tmp_path):
    code, found = _bench(tmp_path, "all_reduce_norm", *SMALL["all_reduce_norm"], "--against", "none", "--floors")
    assert code == 0
    assert {(row["protocol"], row["bytes"]) for row in found if row["what"] == "floor"} >= {("one_shot", 256)}


def test_a_topk_of_one_rank_that_needs_no_other(tmp_path, capsys):
    options = ("--rows", "1,2", "--columns", "200,2500", "--k", "5,64", "--dtype", "f32")
    code, found = _bench(tmp_path, "topk", *options)
    assert code == 0
    assert [(row["rows"], row["columns"], row["k"]) for row in found] == [
        (rows, columns, k) for rows in (1, 2) for columns in (200, 2500) for k in (5, 64)
    ]
    assert {(row["world"], row["baseline"], row["correct"]) for row in found} == {(1, "torch_topk", True)}
    assert {row["baseline_us"] > 0 for row in found} == {True}
    assert "topk, 1 rank on" in capsys.readouterr().out


def test_every_rank_may_have_a_topk_of_its_own(tmp_path):
    code, (row,) = _bench(tmp_path, "topk", *SMALL["topk"], "--world", "2", "--against", "none")
    assert (code, row["world"], row["correct"]) == (0, 2, True)


@pytest.mark.parametrize(("world", "mode", "dtype"), [(1, "all", "f32"), (2, "owner", "bf16"), (3, "shard", "f16")])
def test_an_exchange(tmp_path, world, mode, dtype):
    options = ("--exchange-mode", mode, "--world", str(world), "--dtype", dtype)
    code, (row,) = _bench(tmp_path, "topk_exchange", *SMALL["topk_exchange"], *options)
    assert code == 0
    assert (row["world"], row["exchange_mode"], row["correct"], row["max_error"]) == (world, mode, True, 0.0)
    assert (row["rows"], row["columns"], row["k"], row["hidden"]) == (2, 100, 5, None)
    assert f"--exchange-mode {mode}" in row["command"]
    assert row["us"] > 0
    assert row["enqueue_us"] > 0


def test_an_exchange_of_what_ranks_have_found(tmp_path, capsys):
    code, (row,) = _bench(tmp_path, "topk_exchange", *SMALL["topk_exchange"], "--given", "candidates", "--world", "2")
    assert (code, row["given"], row["correct"], row["us"] > 0) == (0, "candidates", True, True)
    assert "--given candidates" in row["command"]
    assert "topk_exchange all candidates, 2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize("what", SMALL)
def test_one_wrong_bit_of_any_tensor_is_found(tmp_path, monkeypatch, what):
    right, places = OURS[what].call, range(2 if what == "all_reduce_norm" else 3)
    for place in places:

        def wrong(self, index: int, place: int = place) -> tuple[torch.Tensor, ...]:
            result = right(self, index)
            if index == 2:
                words = result[place].view({2: torch.int16, 4: torch.int32}[result[place].element_size()])
                words.view(-1)[-1] ^= 2 if (what, place) == ("all_reduce_norm", 0) else 1  # normed may be off by one
            return result

        monkeypatch.setattr(OURS[what], "call", wrong)
        folder = tmp_path / str(place)
        folder.mkdir()
        code, (row,) = _bench(folder, what, *SMALL[what], "--world", "1", "--against", "none", "--no-floors")
        assert (code, row["correct"], row["us"]) == (1, False, None), place


@pytest.mark.parametrize(
    ("what", "baseline"),
    [("all_reduce_norm", "separate"), pytest.param("topk_exchange", "gather_topk", marks=pytest.mark.full)],
)
def test_against_the_groups_own_backend(tmp_path, what, baseline):
    target = targets.active().name
    if target != "host":
        pytest.skip("the backends of GPUs have benchmarks of their own")
    results = tmp_path / "results.jsonl"
    options = (*SMALL[what], "--target", target, "--against", f"gloo_{baseline}", *QUICK, "--json", str(results))
    done = torchrun(f"benchmarks/{what}.py", 2, *options)
    assert done.returncode == 0, done.stderr
    (row,) = [json.loads(line) for line in results.read_text().splitlines()]
    assert (row["what"], row["baseline"], row["correct"]) == (what, f"gloo_{baseline}", True)
    assert row["baseline_us"] > 0, done.stdout
    assert row["command"].startswith(f"torchrun --nproc-per-node 2 -m flycomm bench {what} --target host")
