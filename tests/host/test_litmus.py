# SPDX-License-Identifier: Apache-2.0
"""Litmus tests of the order of visibility: every round is counted, orders that are left out are noticed, waits end."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest
import torch

from flycomm import targets
from flycomm.errors import CommTimeout
from flycomm.kernels import _litmus_plan as plan
from flycomm.kernels.litmus import litmus
from flycomm.litmus import cli, verdict
from flycomm.litmus.run import Result, Settings, pairings, roles
from flycomm.litmus.run import run as run_litmus
from tests.launch import torchrun
from tests.ranks import on_ranks, run

CASES = verdict.CASES
HOST = pytest.mark.host_only  # where a seed, and not a chip, decides what is seen


def results(size: int, rounds: int, cases: Any = CASES, seed: int = 1) -> list[Result]:
    target = targets.pick()
    targets.activate(target)
    settings = Settings(target, tuple(cases), rounds, seed, 20.0)
    first, *others = on_ranks(size, lambda world: run_litmus(world, settings))
    assert all(other == first for other in others), "all ranks have the counts of all"
    return first


@pytest.mark.parametrize(("size", "rounds"), [(2, 20), (3, 5), (4, 5)])
def test_every_execution_is_counted_and_none_is_forbidden(size: int, rounds: int):
    found = results(size, rounds, CASES if size == 2 else [("mp", "library"), ("iriw", "fenced")])
    for one in found:
        assert one.rounds >= rounds
        assert sum(one.outcomes.values()) == one.executions > 0
        assert one.executions % one.rounds == 0
        assert one.forbidden == 0, one
    assert {one.executions // one.rounds for one in found if one.shape == "mp"} == {
        2 * one.executions // one.rounds for one in found if one.shape == "iriw"
    }


@HOST
@pytest.mark.parametrize("shape", ["mp", "mp_far"])
def test_a_flag_that_waits_for_nothing_is_noticed(shape: str):
    (relaxed, library) = results(2, 200, [(shape, "relaxed"), (shape, "library")])
    assert relaxed.weak > 0
    assert relaxed.outcomes.keys() <= {"new | new", "new | stale", "stale | new", "stale | stale"}
    assert (library.weak, library.outcomes) == (0, {"new | new": library.executions})


@HOST
def test_the_exit_code_says_that_a_forbidden_outcome_was_seen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    words = ["--shape", "mp", "--order", "relaxed", "--rounds", "200"]
    assert cli.main(words) == 0
    assert "allowed" in capsys.readouterr().out
    monkeypatch.setattr(verdict, "_FORBIDDEN", (("mp", "relaxed"),))
    assert cli.main([*words, "--json"]) == 1
    (test,) = json.loads(capsys.readouterr().out)["tests"]
    assert test["weak_is_forbidden"]
    assert test["forbidden"] == test["weak"] > 0


def test_results_as_a_table_and_in_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Any):
    path = tmp_path / "new" / "litmus.json"
    assert cli.main(["--shape", "coherence,sb", "--order", "relaxed", "--rounds", "3", "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    found = json.loads(path.read_text())
    assert [one["shape"] for one in found["tests"]] == ["sb", "coherence"]
    assert found["world"] >= 2
    for one in found["tests"]:
        assert f"{one['executions']:,}" in shown


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--world", "1"], "needs a peer; pass --world 2 or more"),
        (["--rounds", "0"], "--rounds 0 is too few; give at least 1"),
        (["--shape", "lb"], "--shape 'lb' is not one of mp, mp_far, sb, iriw, coherence"),
        (["--shape", "mp", "--order", "fenced"], "--shape mp has no order fenced"),
    ],
)
def test_usage(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(words) == 2
    assert sentence in capsys.readouterr().err


def test_a_flag_that_does_not_come_ends_the_test():
    blocks, threads = 1, 128

    def body(comm: Any) -> None:
        peers = comm.peers("litmus")
        target = peers.segment0 if comm.rank else peers.segment1  # rank 1 tells itself, so rank 0 waits for nothing
        kernel = comm._session.load(litmus(2, "mp", "library", blocks, threads))
        counts = torch.zeros(blocks * threads, plan.OUTCOMES, dtype=torch.int32, device=comm.device)
        kernel(peers, peers.segment1, target, counts.data_ptr(), 3, 1, 0, comm.stream())
        comm._session.synchronize()
        assert counts.sum() == 0
        with pytest.raises(CommTimeout) as caught:
            comm.check()
        assert caught.value.record.reason in ("timeout", "abort")
        assert caught.value.record.peer == 1 - comm.rank

    run(2, body, kernel_channels={"litmus": (blocks, plan.slot_bytes(2, blocks, threads))}, timeout=0.3)


@pytest.mark.full
def test_ranks_that_are_processes(tmp_path: Any):
    path = tmp_path / "litmus.json"
    done = torchrun("flycomm", 2, "litmus", "--rounds", "50", "--json", str(path))
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["processes"]
    assert [(one["shape"], one["order"]) for one in found["tests"]] == list(CASES)
    assert all(one["forbidden"] == 0 for one in found["tests"])


# ---- who plays what


@pytest.mark.parametrize("size", range(2, 9))
def test_every_two_ranks_are_paired_once(size: int):
    ways = pairings(size)
    pairs = [pair for way in ways for pair in way]
    assert sorted(pairs) == list(combinations(range(size), 2))
    assert all(len(set(sum(way, ()))) == 2 * len(way) for way in ways)


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("shape", plan.SHAPES)
def test_every_rank_is_written_by_one(size: int, shape: str):
    for pairs in pairings(size):
        played = [roles(pairs, shape, rank) for rank in range(size)]
        assert sorted(target for _, target in played) == list(range(size))
        for rank, (partner, target) in enumerate(played):
            assert played[partner][0] == rank
            if partner != rank and shape in ("iriw", "coherence") and len(pairs) > 1:
                assert target not in (rank, partner), "the four actors are four ranks"
            elif partner != rank:
                assert target == partner


def test_what_is_weak():
    weak = {shape: [o for o in range(plan.OUTCOMES) if verdict.is_weak(shape, o)] for shape in plan.SHAPES}
    names = {shape: {verdict.name_of(shape, o) for o in outcomes} for shape, outcomes in weak.items()}
    assert names["sb"] == {"old | old"}
    assert names["iriw"] == {"new old | new old"}
    for shape in ("mp", "mp_far"):
        assert {"stale | stale", "stale | new", "new | stale"} <= names[shape]
    assert all("new old" in name for name in names["coherence"])
    for shape in plan.SHAPES:
        assert verdict.is_impossible(shape, plan.IMPOSSIBLE)
        assert not verdict.is_impossible(shape, plan.NEW_NEW * plan.SIGHTS + plan.NEW_OLD)
