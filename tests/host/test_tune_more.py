# SPDX-License-Identifier: Apache-2.0
"""tune beyond the collectives: what it finds of the fused norm, mono launches and indexers is what calls then do."""

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
from flycomm.bench.harness import BaselineError, Outcome, measure
from flycomm.bench.subjects import SUBJECTS, norm
from flycomm.dispatch import Plan
from flycomm.indexer.applies import applies
from flycomm.tables import Pays, Table
from flycomm.tune import candidates, cli, crossings, options, search
from tests.launch import torchrun
from tests.ranks import run

BRIEF = ("--world", "2", "--timeout", "20")
NORMS = ("--ops", "all_reduce_norm", "--hidden", "64")
MONO = ("--ops", "mono_ffn", "--hidden", "64", "--intermediate", "32", "--projection", "16")
TOKENS = ("--ops", "indexer", "--requests", "1", "--query-rows", "2", "--heads", "16", "--k", "8")

pytestmark = pytest.mark.host_only  # grids are the host's


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, no ``FLYCOMM_TABLE``, and as few grids and calls as can be."""
    monkeypatch.delenv("FLYCOMM_TABLE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    grids = candidates.Grids(4, (64,), (1,), (8192,))
    monkeypatch.setattr(candidates.Grids, "of", lambda *anything: grids)
    monkeypatch.setattr(options, "_SAMPLES", {False: (4, 1), True: (4, 1)})
    return tmp_path


def _tune(*words: str) -> int:
    return cli.main(["--target", targets.active().name, *BRIEF, *words])


def _written() -> Table:
    return tables.load(targets.active().capabilities(0).arch)


def _timed(
    monkeypatch: pytest.MonkeyPatch, us: Callable[[str, int], float], after: bool = False
) -> list[tuple[str, int]]:
    """Norms are measured as they are, but with times that are made up, by protocol and rows (0: an all-reduce); gives
    what rank 0 did, with ``after`` also by what an all-reduce goes that separate kernels follow."""
    seen: list[tuple[str, int]] = []

    def made_up(context: Any, contender: Any, problem: Any, method: Any, exact: bool) -> Outcome:
        rows, alone = 0, context.comm.plan("all_reduce", torch.bfloat16, 4096, captured=False).protocol
        protocol = alone
        if context.collective.name == "all_reduce_norm":
            rows, hidden = problem.inputs[0].x.shape
            protocol = context.comm.plan_rms_norm(torch.bfloat16, rows, hidden, False).protocol
        if context.world.rank == 0:
            seen.append((f"{protocol} after {alone}" if after and protocol == "separate" else protocol, rows))
        outcome = measure(context, contender, problem, method, exact)
        return outcome if outcome.us is None else replace(outcome, us=us(protocol, rows))

    monkeypatch.setattr(search, "measure", made_up)
    return seen


def _plans(*rows: int) -> list[Plan]:
    def body(comm: Any) -> list[Plan]:
        return [comm.plan_rms_norm(torch.bfloat16, one, 64, False) for one in rows]

    found = run(2, body)
    assert found[0] == found[1]
    return list(found[0])


def test_the_next_init_fuses_where_that_was_faster(cache, monkeypatch, capsys):
    def us(protocol: str, rows: int) -> float:
        return 5.0 if protocol == "separate" else (2.0 if protocol == "packets" else 3.0) * (4 if rows == 4 else 1)

    seen = _timed(monkeypatch, us)
    assert [one.protocol for one in _plans(1, 4, 100)] == ["flags"] * 3
    assert _tune(*NORMS, "--rows", "1,4", "--commit", "abc") == 0
    assert set(seen) == {(name, rows) for name in ("separate", "flags", "packets", "sentinel") for rows in (1, 4)}
    one, four, many = _plans(1, 4, 100)
    assert one.row is not None
    assert (one.protocol, one.row.threads) == ("packets", 64)
    assert [four.protocol, many.protocol] == ["separate"] * 2, "where separate kernels are faster, and longer"
    shown = capsys.readouterr().out
    assert ["1", "×", "64", "packets", "1", "×", "64", "2.00", "5.00", "150%", "3.00", "50%"] in map(
        str.split, shown.splitlines()
    )
    assert ["4", "×", "64", "separate", "5.00", "5.00", "0%", "12.00", "140%"] in map(str.split, shown.splitlines())
    assert "separate kernels are faster from 512 B on" in shown
    assert _written().how.startswith("2 ranks, all_reduce_norm, eager, rows 1,4, hidden 64: python -m flycomm tune ")
    assert "--rows 1,4 --hidden 64 --modes eager" in _written().how


def test_a_wrong_norm_keeps_a_candidate_out(cache, monkeypatch, capsys):
    right = norm.FlycommNorm.call

    def wrong(self: norm.FlycommNorm, index: int) -> Any:
        normed, residual = right(self, index)
        protocol = self._comm.plan_rms_norm(torch.bfloat16, *residual.shape, captured=False).protocol
        if index == 2 and self._comm.rank == 1 and protocol == "packets":
            residual.view(torch.int16)[-1] ^= 1
        return normed, residual

    monkeypatch.setattr(norm.FlycommNorm, "call", wrong)
    _timed(monkeypatch, lambda protocol, rows: 1.0 if protocol == "packets" else 2.0)
    assert _tune(*NORMS, "--rows", "1") == 1
    assert "all_reduce_norm, 1 × 64, packets 1 × 64: the result is wrong by up to" in capsys.readouterr().out
    assert _plans(1)[0].protocol != "packets"


def test_a_norm_ends_by_itself(cache, monkeypatch, capsys):
    def slow(protocol: str, rows: int) -> float:
        time.sleep(0.4)
        return 1.0

    seen = _timed(monkeypatch, slow)
    assert _tune(*NORMS, "--rows", "1,4", "--limit-seconds", "1") == 0
    assert len(seen) < 8
    assert "time was up after 1 s" in capsys.readouterr().out


def _duelling(monkeypatch: pytest.MonkeyPatch, op: str, us: Callable[[str, Any], float]) -> None:
    """Nothing is measured: ``us`` by contender and case is what is said to have been."""
    monkeypatch.setitem(SUBJECTS, op, replace(SUBJECTS[op], problem=lambda context, case: case))

    def ours(context: Any, contender: Any, case: Any, method: Any, exact: bool) -> Outcome:
        return Outcome(us("ours", case), 0.0, True, 0.0)

    def theirs(context: Any, variants: Any, case: Any, method: Any) -> Outcome:
        found = us(variants[0].name, case)
        if found < 0:
            raise BaselineError("it broke")
        return Outcome(found, 0.0, True, 0.0)

    monkeypatch.setattr(crossings, "measure", ours)
    monkeypatch.setattr(crossings, "measure_best", theirs)
    monkeypatch.setattr(crossings.baselines, "usable", lambda context, names: (list(names), {}))


def test_a_runner_gets_the_rows_that_were_faster(cache, monkeypatch, capsys):
    apart = {"ours": 3.0, "separate_flycomm": 5.0, "separate_gloo": 4.0}
    _duelling(monkeypatch, "mono_ffn", lambda name, case: apart[name] * (case.rows if name == "ours" else 1))
    before = _written()
    assert _tune(*MONO, "--rows", "1,2") == 0
    assert _written().mono == (Pays("mono_ffn", (2, 2), 64, 32, 1),)
    assert _written().rows == before.rows
    shown = capsys.readouterr().out
    assert "mono_ffn, hidden 64, intermediate 32: one launch up to 1 rows" in shown
    assert "separate_gloo" in shown, "the faster of the two"
    assert "separate_flycomm" not in shown


def test_what_there_was_no_time_for_is_not_believed(cache, monkeypatch, capsys):
    def us(name: str, case: Any) -> float:
        time.sleep(1.1 if name == "ours" else 0.0)
        return 1.0 if name == "ours" else 2.0

    _duelling(monkeypatch, "mono_ffn", us)
    assert _tune(*MONO, "--rows", "1,2", "--limit-seconds", "1") == 0
    assert _written().mono == (Pays("mono_ffn", (2, 2), 64, 32, 1),)
    assert "nothing of 1 sizes" in capsys.readouterr().out


def test_an_indexer_gets_the_context_from_which_on_sharing_was_faster(cache, monkeypatch, capsys):
    """Also what was not set beside anything leaves no line."""

    def us(name: str, case: Any) -> float:
        return 10.0 if name == "ours" else -1.0 if case.kind == "block_max" else case.context / 40

    _duelling(monkeypatch, "indexer", us)
    kinds = ("--kind", "dsa,block_max", "--context", "1200,200,600", "--k", "1")
    assert _tune(*TOKENS, *kinds) == 0
    table = _written()
    assert [(one.kind, one.worlds, one.rows, one.context) for one in table.indexer] == [("dsa", (2, 2), 2, 400)]
    assert not applies(table, "dsa", 2, 399, 2)
    assert applies(table, "dsa", 2, 400, 2)
    shown = capsys.readouterr().out
    assert "indexer dsa, 2 rows: ranks share the scoring from 400 tokens on" in shown
    assert "replicated: it broke" in shown


def test_one_command_does_all_and_the_later_go_by_the_earlier(cache, monkeypatch, capsys):
    seen = _timed(monkeypatch, lambda protocol, rows: 1.0 if protocol == "packets" else 2.0, after=True)
    in_force: list[str] = []
    _duelling(monkeypatch, "mono_ffn", lambda name, case: 1.0 if name == "ours" else 2.0)
    duel = crossings.Crossing._duel

    def noting(self: Any, finder: Any, context: Any, case: Any, names: Any) -> None:
        in_force.append(context.comm.plan_rms_norm(torch.bfloat16, 1, 64, False).protocol)
        duel(self, finder, context, case, names)

    monkeypatch.setattr(crossings.Crossing, "_duel", noting)
    ops = ("--ops", "mono_ffn,all_reduce_norm,all_reduce", "--from", "4KiB", "--to", "4KiB")
    assert _tune(*ops, *MONO[2:], "--rows", "1") == 0
    assert ("separate after packets", 1) in seen
    assert ("flags", 0) in seen
    assert in_force == ["packets"] * 2
    assert _written().mono == (Pays("mono_ffn", (2, 2), 64, 32, 1),)
    assert [row.protocol for row in _written().of("all_reduce_norm", 2, False)][:1] == ["packets"]


@pytest.mark.full
def test_mono_and_separate_as_they_are(cache, tmp_path):
    """Processes, so that the group's own backend takes part."""
    words = (*MONO, "--rows", "1", "--quick", "--target", targets.active().name, "--timeout", "20")
    done = torchrun("flycomm", 2, "tune", *words, env={"XDG_CACHE_HOME": str(tmp_path), "FLYCOMM_TABLE": ""})
    assert done.returncode == 0, done.stderr
    assert "was not set beside" not in done.stdout
    data = json.loads((tmp_path / "flycomm" / f"{targets.active().capabilities(0).arch}.json").read_text())
    (line,) = data["mono"]
    assert (line["kernel"], line["worlds"], line["hidden"], line["inter"]) == ("mono_ffn", [2, 2], 64, 32)
    assert line["rows"] in (0, 1)


@pytest.mark.full
def test_shared_and_alone_as_they_are(cache, capsys):
    assert _tune(*TOKENS, "--kind", "dsa", "--context", "150") == 0
    (line,) = _written().indexer
    assert (line.kind, line.worlds, line.rows, line.source) == ("dsa", (2, 2), 2, "measured")
    assert ["dsa,", "1", "×", "2", "rows,"] in [one.split()[:5] for one in capsys.readouterr().out.splitlines()]
