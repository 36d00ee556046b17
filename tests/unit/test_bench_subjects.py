# SPDX-License-Identifier: Apache-2.0
"""What a norm, a top-k and an exchange must give: right results pass, and results that are wrong in one way do not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flycomm.bench import compare, labels, plot, report, rows
from flycomm.bench.harness import Outcome, _spoil
from flycomm.bench.problem import BUFFERS, Case
from flycomm.bench.reference import DTYPES, make_input
from flycomm.bench.subjects import SUBJECTS, exchange, norm, topk
from flycomm.bench.subjects.best import best
from flycomm.dtypes import REDUCTIONS
from tests.host.norm_reference import rms_norm

COMMON = {"target": "cuda", "device": "a chip", "world": 2, "mode": "graph", "command": "x"}
NORM = Case(4 * 64 * 2, "bf16", rows=4, hidden=64)
EXCHANGE = Case(3 * 40 * 4, "f32", rows=3, columns=40, k=5, exchange_mode="all")


def _context(world: int = 2, rank: int = 0) -> Any:
    return SimpleNamespace(world=SimpleNamespace(size=world, rank=rank), device=torch.device("cpu"))


def _normed(dtype: str) -> tuple[norm.NormProblem, torch.Tensor, torch.Tensor]:
    """A problem, and normed and residual_out of its buffer 0 by the kernels' own formulas."""
    case = Case(0, dtype, rows=4, hidden=64)
    problem = norm.NormProblem(_context(), case)
    _, residual, weight = problem.inputs[0]
    total = sum(make_input(rank, 0, 4 * 64, DTYPES[dtype]).float() for rank in range(2)).to(DTYPES[dtype])
    added = total.view(4, 64).float() + residual.float()
    return problem, rms_norm(added, weight, norm.EPS, 8).to(residual.dtype), added.to(residual.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exact", [True, False])
def test_a_norm_as_the_kernels_make_it_is_right(dtype, exact):
    problem, normed, residual = _normed(dtype)
    verdict = problem.judge({0: (normed, residual)}, exact)
    assert verdict.correct
    assert len(problem.inputs) == BUFFERS


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bit_of_the_residual_and_two_roundings_of_the_norm_are_too_much(dtype):
    problem, normed, residual = _normed(dtype)
    words = torch.int32 if dtype == "f32" else torch.int16
    for one, off in ((residual, 1), (normed, 64 if dtype == "f32" else 2)):
        place = int(one.abs().argmax())
        before = one.view(-1)[place].clone()
        one.view(words).view(-1)[place] += off
        assert not problem.judge({0: (normed, residual)}, exact=True).correct
        one.view(-1)[place] = before
    assert problem.judge({0: (normed, residual)}, exact=True).correct


@pytest.mark.parametrize("fault", ["weight", "residual", "rows", "eps", "nan"])
def test_a_baseline_that_leaves_something_out_is_wrong(fault):
    problem, normed, residual = _normed("bf16")
    changed = {
        "weight": lambda: (normed / problem.inputs[0].weight, residual),
        "residual": lambda: (normed, residual - problem.inputs[0].residual),
        "rows": lambda: (normed.flip(0), residual.flip(0)),
        "eps": lambda: (normed * 1.5, residual),
        "nan": lambda: (normed * float("nan"), residual),
    }[fault]()
    assert not problem.judge({0: changed}, exact=False).correct


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_best_are_those_of_a_sort_by_score_and_id(dtype):
    scores = make_input(0, 0, 3 * 4096, DTYPES[dtype]).view(3, 4096)
    scores[1] = scores[1].round()  # ties
    scores[2, ::2], scores[2, 1::2] = 0.0, -0.0
    values, ids = best(scores, 100)
    wide = scores.float().numpy()
    for row in range(3):
        expected = np.lexsort((np.arange(4096), -wide[row]))[:100]
        assert np.array_equal(ids[row].numpy(), expected)
        assert np.array_equal(values[row].numpy(), wide[row][expected])


def test_a_rank_gets_every_row_or_its_own_or_its_own_keys():
    ids = torch.tensor([[7, 4, 1], [2, 0, 6]], dtype=torch.int32)
    values = torch.tensor([[9.0, 8.0, 7.0], [6.0, 5.0, 4.0]])
    none = float("-inf")
    assert exchange.on_rank(values, ids, "all", 1, 2)[1].tolist() == ids.tolist()
    scores, own, counts = exchange.on_rank(values, ids, "owner", 1, 2)
    assert (own.tolist(), counts.tolist()) == ([[-1, -1, -1], [2, 0, 6]], [0, 3])
    assert scores.tolist() == [[none] * 3, [6.0, 5.0, 4.0]]
    scores, own, counts = exchange.on_rank(values, ids, "shard", 0, 2)
    assert (own.tolist(), counts.tolist()) == ([[4, -1, -1], [2, 0, 6]], [1, 3])
    assert scores.tolist() == [[8.0, none, none], [6.0, 5.0, 4.0]]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_candidates_are_a_ranks_own_best_in_order_and_the_result_is_that_of_all_scores(dtype):
    case = replace(EXCHANGE, dtype=dtype, given="candidates")
    for rank in range(2):
        whole = exchange.ExchangeProblem(_context(rank=rank), replace(EXCHANGE, dtype=dtype))
        found = exchange.ExchangeProblem(_context(rank=rank), case)
        for scores, chosen in zip(whole.inputs, found.inputs, strict=True):
            assert (scores.ids, chosen.scores.dtype, chosen.ids.dtype) == (None, torch.float32, torch.int32)
            assert torch.equal(chosen.scores, scores.scores.float().gather(1, chosen.ids.long()))
            assert torch.equal(chosen.scores, torch.topk(scores.scores.float(), 5).values)
        assert all(map(torch.equal, found._expected[0].ids, whole._expected[0].ids))


@pytest.mark.parametrize("kind", [topk.TopkProblem, exchange.ExchangeProblem])
def test_a_selection_that_is_wrong_in_one_id_score_or_count_is_found(kind):
    problem = kind(_context(), EXCHANGE)
    want = problem._expected[0]
    right = (want.values, want.ids, torch.full((3,), 5))
    assert problem.judge({0: right}, exact=True).correct
    assert problem.judge({0: right[:2]}, exact=False).correct
    swapped, repeated, negative = (want.ids.clone() for _ in range(3))
    swapped[1, :2] = want.ids[1, [1, 0]]
    repeated[1, 4] = want.ids[1, 3]
    negative[2, 0] = -1
    near = want.values.clone()
    near.view(torch.int32)[2, 4] += 1
    for found in [(want.values, wrong) for wrong in (swapped, repeated, negative)] + [(near, want.ids)]:
        assert not problem.judge({0: (*found, right[2])}, exact=True).correct
        assert not problem.judge({0: found}, exact=False).correct
    assert not problem.judge({0: (*right[:2], torch.tensor([5, 5, 4]))}, exact=True).correct


def test_a_baseline_may_choose_among_equal_scores_and_flycomm_may_not():
    problem = topk.TopkProblem(_context(), Case(0, "bf16", rows=1, columns=4096, k=64))
    want = problem._expected[0]
    (places,) = (want.values[0].diff() == 0).nonzero()[:1].tolist()
    other = want.ids.clone()
    other[0, places], other[0, places[0] + 1] = want.ids[0, places[0] + 1], want.ids[0, places[0]]
    assert problem.judge({0: (want.values, other)}, exact=False).correct
    assert not problem.judge({0: (want.values, other, torch.tensor([64]))}, exact=True).correct
    other[0, places[0]] = other[0, places[0] + 1]
    assert not problem.judge({0: (want.values, other)}, exact=False).correct, "the same id twice"


def test_every_tensor_of_a_result_is_spoilt():
    found = (torch.ones(2), torch.ones(2, dtype=torch.int32))
    _spoil(found)
    assert found[0].isnan().all()
    assert found[1].tolist() == [-(2**31)] * 2


def test_flycomm_does_every_subject():
    for name, subject in SUBJECTS.items():
        does = subject.contender().does
        assert does[name] in ((None,), REDUCTIONS)


# ---------------------------------------------------------------------- rows, tables, plots


def _rows(what: str, case: Case, us: float = 4.0) -> list[rows.Row]:
    baselines = {"separate": Outcome(12.0, 0.1, True, 0.1)}
    return rows.of_case({**COMMON, "what": what}, case, "flags", Outcome(us, 0.5, True, 0.0), baselines)


def test_rows_have_the_measures_of_their_subject():
    (row,) = _rows("topk_exchange", EXCHANGE)
    assert list(row) == list(rows.KEYS)
    assert (row["rows"], row["hidden"], row["columns"], row["k"]) == (3, None, 40, 5)
    assert (row["bytes"], row["exchange_mode"], row["baseline"]) == (480, "all", "separate")
    assert [labels.size(row), labels.collective(row)] == ["3 × 40, k 5", "topk_exchange all"]
    (other,) = _rows("topk_exchange", replace(EXCHANGE, given="candidates"))
    assert labels.collective(other) == "topk_exchange all candidates"
    assert len(compare.compare([row, other], [row, other], whole=True).lines) == 4, "ours and a baseline of each"
    (row,) = _rows("all_reduce_norm", NORM)
    assert [labels.size(row), labels.collective(row)] == ["4 × 64", "all_reduce_norm"]


def test_two_shapes_of_the_same_bytes_are_two_lines_panels_and_keys():
    other = Case(NORM.num_bytes, "bf16", rows=2, hidden=128)
    found = _rows("all_reduce_norm", NORM) + _rows("all_reduce_norm", other, 5.0)
    ((title, columns, lines),) = report.tables(found)
    assert title.startswith("all_reduce_norm, 2 ranks")
    assert columns[0] == "message"
    assert [line[0] for line in lines] == ["4 × 64", "2 × 128"]
    assert [panel.partition(":")[0] for panel in plot._panels(found)] == [
        "all_reduce_norm, bf16, hidden 64, graph",
        "all_reduce_norm, bf16, hidden 128, graph",
    ]
    compared = compare.compare(found, found, whole=True)
    assert len(compared.lines) == 4
    assert "all_reduce_norm, flycomm, 2 × 128, bf16, 2 ranks, graph" in [str(line.key) for line in compared.lines]
