# SPDX-License-Identifier: Apache-2.0
"""``python -m flycomm tune`` end to end: what it measures it writes, and what it wrote all ranks use."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flycomm import tables, targets
from flycomm.bench.harness import Outcome, measure
from flycomm.bench.ours import Flycomm
from flycomm.errors import CommTimeout
from flycomm.tables import Row, Table
from flycomm.tune import candidates, cli, search
from tests.launch import mpirun, torchrun
from tests.ranks import run

RANKS = Path(__file__).with_name("table_ranks.py")
BRIEF = ("--from", "2KiB", "--to", "4KiB", "--quick", "--timeout", "20")

pytestmark = pytest.mark.host_only  # grids are the host's


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no ``FLYCOMM_TABLE``."""
    monkeypatch.delenv("FLYCOMM_TABLE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def one_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1 × 64, and three pieces."""
    grids = candidates.Grids(1, (64,), (1,), (8192, 16384, 32768))
    monkeypatch.setattr(candidates.Grids, "of", lambda *anything: grids)


def _tune(*options: str) -> int:
    return cli.main(["--target", targets.active().name, *BRIEF, *options])


def _arch() -> str:
    return targets.active().capabilities(0).arch


def _plan(context: Any, problem: Any) -> Row:
    row = Flycomm.plan(context, problem.case, False).row
    assert row is not None
    return row


def _timed(monkeypatch: pytest.MonkeyPatch, us: Callable[[Row, int], float]) -> list[tuple[str, int, str]]:
    """Everything is measured as it is, but with times that are made up; gives what rank 0 measured."""
    seen: list[tuple[str, int, str]] = []

    def made_up(context: Any, contender: Any, problem: Any, method: Any, exact: bool) -> Outcome:
        row = _plan(context, problem)
        if context.world.rank == 0:
            seen.append((context.collective.name, problem.case.num_bytes, row.protocol))
        outcome = measure(context, contender, problem, method, exact)
        return outcome if outcome.us is None else replace(outcome, us=us(row, problem.case.num_bytes))

    monkeypatch.setattr(search, "measure", made_up)
    return seen


def _protocols(op: str, world: int) -> list[str]:
    def body(comm: Any) -> list[str]:
        return [comm.plan(op, torch.bfloat16, size, captured=False).protocol for size in (64, 2048, 4096, 8192)]

    found = run(world, body)
    assert all(one == found[0] for one in found)
    return found[0]


def test_the_next_init_uses_what_was_measured(cache, monkeypatch, capsys):
    before = tables.load(_arch())
    seen = _timed(monkeypatch, lambda row, size: 1.0 if (row.protocol == "packets") == (size == 2048) else 2.0)
    assert _protocols("all_gather", 2) == ["flags"] * 4
    assert _tune("--world", "2", "--ops", "all_gather", "--commit", "abc") == 0
    assert {(size, protocol) for _, size, protocol in seen} == {
        (size, protocol) for size in (2048, 4096) for protocol in ("flags", "packets")
    }
    assert {op for op, *_ in seen} == {"all_gather"}
    shown = capsys.readouterr().out
    path = tables.user_path(_arch())
    assert path == cache / "flycomm" / f"{_arch()}.json"
    assert shown.splitlines()[0].startswith("all_gather, 2 ranks on host")
    assert ["2", "KiB", "packets", "1", "×", "64", "whole", "1.00", "2.00", "100%"] in map(
        str.split, shown.splitlines()
    )
    assert ["4", "KiB", "flags", "1", "×", "64", "whole", "1.00", "1.00", "0%"] in map(str.split, shown.splitlines())
    assert shown.endswith(f"written: {path}\n"), "it is in force from now on"
    written = tables.load(_arch())
    assert (written.arch, written.source) == (_arch(), "measured")
    assert written.how == (
        "2 ranks, all_gather, eager, 2KiB to 4KiB: python -m flycomm tune --world 2 --target host --ops all_gather "
        f"--from 2KiB --to 4KiB --modes eager --quick on {targets.active().capabilities(0).device_name}, commit abc"
        f" | {before.how}"
    )
    assert sorted(cache.rglob("*.json")) == sorted(path.parent.iterdir()) == [path], "nothing else is left"
    assert _protocols("all_gather", 2) == ["packets", "packets", "flags", "flags"]
    assert _protocols("all_gather", 3) == _protocols("all_reduce", 2) == ["flags"] * 4


@pytest.mark.full
def test_another_world_and_another_operation_are_added(cache, monkeypatch):
    _timed(monkeypatch, lambda row, size: 1.0 if row.protocol == "packets" else 2.0)
    assert _tune("--world", "2", "--ops", "all_gather") == 0
    assert _tune("--world", "3", "--ops", "all_gather") == 0
    assert _tune("--world", "2", "--ops", "reduce_scatter") == 0
    assert _protocols("all_gather", 2)[1] == _protocols("all_gather", 3)[1] == "packets"
    assert _protocols("reduce_scatter", 2)[1] == "packets"
    assert _protocols("reduce_scatter", 3)[1] == _protocols("all_gather", 1)[1] == "flags"


def test_a_file_of_ones_own_is_added_to_and_is_not_in_force(cache, monkeypatch, capsys):
    path = cache / "own" / "table.json"
    _timed(monkeypatch, lambda row, size: 1.0 if row.protocol == "packets" else 2.0)
    assert _tune("--world", "2", "--ops", "all_gather", "--out", str(path)) == 0
    shown = capsys.readouterr().out
    assert f"FLYCOMM_TABLE={path}" in shown
    assert "in force is the shipped table" in shown
    assert not tables.user_path(_arch()).exists()
    assert _tune("--world", "3", "--ops", "all_gather", "--out", str(path)) == 0
    monkeypatch.setenv("FLYCOMM_TABLE", str(path))
    assert _protocols("all_gather", 2)[1] == _protocols("all_gather", 3)[1] == "packets"


def test_pieces_of_looping_protocols_are_searched(cache, one_grid, monkeypatch):
    """A crossover from one-shot to two-shot, and the best piece of each."""

    def us(row: Row, size: int) -> float:
        if row.protocol not in tables.LOOPING:
            return 50.0
        crossed = (row.protocol == "two_shot") == (size >= 65536)
        return 10.0 + (not crossed) + abs(row.capacity - 16384) / 16384

    seen = _timed(monkeypatch, us)
    assert _tune("--world", "2", "--ops", "all_reduce", "--from", "32KiB", "--to", "64KiB") == 0
    assert {protocol for _, _, protocol in seen} == set(tables.PROTOCOLS)
    rows = {row.largest: row for row in tables.load(_arch()).of("all_reduce", 2, False)}
    assert (rows[32768].protocol, rows[32768].capacity) == ("flags", 16384)
    assert (rows[65536].protocol, rows[65536].capacity) == ("two_shot", 16384)


def test_one_wrong_bit_keeps_a_candidate_out(cache, one_grid, monkeypatch, capsys):
    right = Flycomm.call

    def wrong(self: Flycomm, index: int) -> torch.Tensor:
        result = right(self, index)
        share = min(self._inputs[0].nbytes, self._outputs[0].nbytes)
        plan = self._comm.plan("all_gather", torch.bfloat16, share, captured=False)
        if index == 2 and self._comm.rank == 1 and plan.protocol == "packets":
            result.view(torch.int16)[-1] ^= 1
        return result

    monkeypatch.setattr(Flycomm, "call", wrong)
    _timed(monkeypatch, lambda row, size: 1.0 if row.protocol == "packets" else 2.0)
    assert _tune("--world", "2", "--ops", "all_gather") == 1
    shown = capsys.readouterr().out
    assert "all_gather, 2 KiB, packets 1 × 64: the result is wrong by up to" in shown
    assert {row.protocol for row in tables.load(_arch()).of("all_gather", 2, False)} == {"flags"}


def test_it_ends_by_itself_and_keeps_what_it_has(cache, one_grid, monkeypatch, capsys):
    limit = 3.0

    def us(row: Row, size: int) -> float:
        if row.protocol == "packets":
            time.sleep(limit)
        return 1.0 if row.protocol == "packets" else 2.0

    seen = _timed(monkeypatch, us)
    assert _tune("--world", "2", "--ops", "all_gather", "--limit-seconds", f"{limit:g}") == 0
    assert [(size, protocol) for _, size, protocol in seen] == [(2048, "flags"), (4096, "flags"), (2048, "packets")]
    assert "time was up after 3 s: not every candidate was measured; give more" in capsys.readouterr().out
    assert [row.protocol for row in tables.load(_arch()).of("all_gather", 2, False)][:2] == ["packets", "flags"]


def test_no_time_at_all_writes_nothing(cache, capsys):
    assert _tune("--world", "2", "--limit-seconds", "1e-6") == 2
    assert "nothing was measured in --limit-seconds 1e-06" in capsys.readouterr().err
    assert list(cache.rglob("*")) == []


def test_a_failure_writes_nothing_and_is_told(cache, monkeypatch, capsys):
    def fails(*everything: Any) -> Outcome:
        raise CommTimeout("a wait gave up")

    monkeypatch.setattr(search, "measure", fails)
    assert _tune("--world", "2") == 2
    assert capsys.readouterr().err == "flycomm tune: a wait gave up\n"
    assert list(cache.rglob("*.json")) == []


def test_a_candidate_that_is_not_what_runs_is_noticed(cache, monkeypatch):
    """A time is never put down to another grid than the one it was measured with."""
    monkeypatch.setattr(search, "budget", lambda table, world, graphs: 1 << 20)
    with pytest.raises(AssertionError, match="capacity"):
        _tune("--world", "2", "--ops", "all_reduce", "--from", "1MiB", "--to", "1MiB")


def test_likely_candidates_are_measured_twice(cache, one_grid, monkeypatch):
    seen = _timed(monkeypatch, lambda row, size: 1.0)
    assert _tune("--world", "2", "--ops", "all_gather", "--to", "2KiB") == 0
    assert sorted(protocol for *_, protocol in seen) == ["flags", "flags", "packets", "packets"]
    assert candidates.LIKELY >= 2


def _leave(folder: Path, arch: str, rows: tuple[Row, ...]) -> Path:
    path = folder / "flycomm" / f"{_arch()}.json"
    path.parent.mkdir(parents=True)
    path.write_text(Table(arch, "measured", "a test", rows).to_json())
    return path


def _distinct() -> tuple[Row, ...]:
    return tuple(Row(op, (1, 8), "any", None, "flags", 2, 128, 8192) for op in tables.OPS)


@pytest.mark.parametrize("case", ["missing", "broken", "wrong"])
def test_every_process_uses_rank_0s_file(tmp_path, case):
    _leave(tmp_path, "another chip" if case == "wrong" else _arch(), _distinct())
    done = torchrun(RANKS, 2, case, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[-2:] == ["rank 0: ok", "rank 1: ok"]


@pytest.mark.slow
@pytest.mark.parametrize("start", [torchrun, pytest.param(mpirun, marks=[pytest.mark.mpi, pytest.mark.full])])
def test_processes(tmp_path, start):
    options = ("--ops", "all_gather", *BRIEF, "--target", targets.active().name)
    done = start("flycomm", 2, "tune", *options, env={"XDG_CACHE_HOME": str(tmp_path), "FLYCOMM_TABLE": ""})
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "flycomm" / f"{_arch()}.json").read_text())
    assert data["how"].startswith("2 ranks, all_gather, eager, 2KiB to 4KiB: ")
    assert " -m flycomm tune --target" in data["how"]
    assert done.stdout.count("written: ") == 1
