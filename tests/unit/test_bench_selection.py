# SPDX-License-Identifier: Apache-2.0
"""What an indexer must give in a benchmark: sizes, all scores by torch, and selections that are wrong in one way."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch

from flycomm.bench import compare, labels, options, plot, report, rows
from flycomm.bench.harness import Outcome
from flycomm.bench.problem import Case
from flycomm.bench.subjects import SUBJECTS
from flycomm.bench.subjects.index_cache import Shape, make
from flycomm.bench.subjects.index_reference import all_scores
from flycomm.bench.subjects.selection import Among, same_bits
from flycomm.errors import UsageError

CPU = torch.device("cpu")
TOKENS = Case(0, "e4m3fn", kind="dsa", context=70, requests=2, query_rows=3, heads=16, k=5)
BLOCKS = Case(0, "bf16", kind="block_max", context=300, requests=2, query_rows=3, k=2)
COMMON = {"what": "indexer", "target": "cuda", "device": "a chip", "world": 2, "mode": "graph", "command": "x"}


def _among() -> tuple[Among, torch.Tensor, torch.Tensor]:
    """Scores of 3 lists of 40 keys, a tolerance of 1e-3, and the 5 best rounded a little."""
    scores = torch.randn((3, 40), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values, ids = scores.topk(5, dim=1)
    return Among(scores, torch.full((3,), 1e-3, dtype=torch.float64)), (values + 5e-4).float(), ids.int()


def test_rounded_scores_and_any_choice_within_the_tolerance_are_right():
    among, scores, ids = _among()
    verdict = among.judge(scores, ids)
    assert verdict.correct
    assert verdict.max_error == pytest.approx(5e-4, rel=1e-3)
    left = next(key for key in range(40) if key not in ids[1])
    among.scores[1, left] = among.scores[1, int(ids[1, 4])] + 1.5e-3  # better, by less than two kernels may differ
    assert among.judge(scores, ids).correct
    among.scores[1, left] += 1e-3
    assert not among.judge(scores, ids).correct


@pytest.mark.parametrize("fault", ["wrong id", "missing best", "order", "twice", "outside", "padding", "score", "nan"])
def test_a_selection_that_is_wrong_in_one_way_is_found(fault):
    among, scores, ids = _among()
    worse = among.scores[1].topk(7).indices[6]
    if fault == "wrong id":
        ids[1, 2] = worse
    elif fault == "missing best":  # with the right score of what was taken instead
        ids[1, :4], ids[1, 4] = ids[1, 1:].clone(), worse
        scores[1, :4], scores[1, 4] = scores[1, 1:].clone(), among.scores[1, worse]
    elif fault == "order":
        ids[2, :2], scores[2, :2] = ids[2, [1, 0]], scores[2, [1, 0]]
    elif fault == "twice":
        ids[0, 4], scores[0, 4] = ids[0, 3], scores[0, 3]
    elif fault in ("outside", "padding"):
        ids[0, 4] = 40 if fault == "outside" else -1
    else:
        scores[0, 0] += 2e-3 if fault == "score" else torch.nan
    assert not among.judge(scores, ids).correct


def test_forced_keys_have_to_be_taken_and_invisible_ones_must_not():
    among, scores, ids = _among()
    worst = among.scores.argmin(1, keepdim=True)
    forced = among.forcing(worst)
    assert not forced.judge(scores, ids).correct
    first = torch.cat([worst.int(), ids[:, :4]], dim=1)
    inf = torch.full((3, 1), torch.inf)
    assert forced.judge(torch.cat([inf, scores[:, :4]], dim=1), first).correct
    assert not among.within(torch.arange(40) != ids[0, 0]).judge(scores, ids).correct
    assert among.lists(torch.tensor([True, False, True])).judge(scores[[0, 2]], ids[[0, 2]]).correct


def test_all_scores_are_compared_where_a_list_sees_a_key():
    among, _, _ = _among()
    some = among.within(torch.arange(40) < 39)
    found = among.scores.float()
    found[:, 39] = torch.nan  # nobody writes there
    assert some.judge_all(found).correct
    found[1, 7] += 2e-3
    assert not some.judge_all(found).correct


def test_bits_are_those_of_every_tensor():
    found = torch.zeros(2), torch.ones(2, dtype=torch.int32)
    assert same_bits(found, [one.clone() for one in found])
    assert not same_bits(found, (-found[0], found[1]))
    assert not same_bits(found, (found[0], found[1] + 1))


def _by_hand(one) -> torch.Tensor:
    """Scores of an input of few tokens, key by key."""
    shape = one.shape
    found = torch.full((shape.lists, -(-shape.context // shape.indexer.block)), -torch.inf, dtype=torch.float64)
    for row in range(shape.rows):
        request, j = divmod(row, shape.query_rows)
        for token in range(shape.context - shape.query_rows + j + 1):
            page = one.cache[one.tables[-1][request, token // shape.page]]
            size = 64 if shape.format == "e2m1" else 128 * shape.dtype.itemsize
            begin, scales = token % shape.page * size, page[shape.page * size :]
            key = page[begin : begin + size]
            if shape.format == "e2m1":
                key = _small_floats(key.tolist(), scales[token % shape.page * 4 :][:4].tolist())
            else:
                key = key.view(shape.dtype).double()
            dots = one.q[row].double() @ key
            if shape.indexer.block > 1:
                column, best = token // shape.indexer.block, dots * 128**-0.5
                lists = slice(row * shape.heads, (row + 1) * shape.heads)
                found[lists, column] = torch.maximum(found[lists, column], best)
            else:
                scale = scales.view(torch.float32)[token % shape.page] if shape.scales == "token" else 1.0
                found[row, token] = scale * (one.weights[row] * dots.relu()).sum()
    return found


def _small_floats(key: list[int], scales: list[int]) -> torch.Tensor:
    """128 elements of e2m1, by exponent and mantissa, times the powers of two of their groups."""
    codes = [code for byte in key for code in (byte & 15, byte >> 4)]
    sizes = [
        code & 1 and 0.5 if code & 6 == 0 else (1 + (code & 1) / 2) * 2.0 ** ((code >> 1 & 3) - 1) for code in codes
    ]
    values = [-size if code & 8 else size for code, size in zip(codes, sizes, strict=True)]
    return torch.tensor([2.0 ** (scales[i // 32] - 127) * value for i, value in enumerate(values)], dtype=torch.float64)


@pytest.mark.parametrize(
    "case",
    [
        TOKENS,
        replace(TOKENS, dtype="bf16"),
        replace(TOKENS, dtype="e2m1"),
        BLOCKS,
        replace(BLOCKS, dtype="e4m3fn"),
        replace(BLOCKS, dtype="e2m1"),
    ],
)
def test_scores_are_those_of_the_formula_in_every_copy_of_the_cache(case):
    one = make(Shape.of(case), 0, 3, CPU)
    scores, most = all_scores(one)
    torch.testing.assert_close(scores, _by_hand(one), rtol=1e-12, atol=1e-12)
    assert (scores <= most[:, None]).all()
    assert len(torch.cat(one.tables).unique()) == 3 * 2 * one.shape.pages, "no page is used twice"
    again, other = make(Shape.of(case), 0, 3, CPU), make(Shape.of(case), 1, 3, CPU)
    assert torch.equal(one.cache, again.cache)
    assert not torch.equal(one.q.float(), other.q.float())


def test_bytes_are_of_the_cache_and_of_a_rank_s_share_of_pages():
    shape = Shape.of(Case(0, "e4m3fn", kind="dsa", context=1 << 20, requests=4, query_rows=4))
    assert (shape.heads, shape.indexer.k, shape.lists, shape.mode) == (64, 2048, 16, "all")
    assert shape.share_bytes(1) == 4 * (1 << 20) * 132
    assert shape.share_bytes(2) == shape.share_bytes(1) // 2
    blocks = Shape.of(replace(BLOCKS, k=None, context=1 << 20, heads=8))
    assert (blocks.lists, blocks.indexer.k, blocks.mode) == (2 * 3 * 8, 16, "owner")
    assert Shape.of(BLOCKS).share_bytes(2) == 2 * 2 * 128 * 256  # the larger share, of two pages of three


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kind": "dsa2"}, "kind 'dsa2' is not one of dsa, block_max"),
        ({"dtype": "f32"}, "format 'f32' is not one of bf16, e4m3fn"),
        ({"k": 69}, "a context of 70 tokens with 3 query rows has not 69 keys of 1 tokens"),
    ],
)
def test_what_is_no_step_is_refused(wrong, says):
    Shape.of(replace(TOKENS, k=68))
    with pytest.raises(UsageError, match=says):
        Shape.of(replace(TOKENS, **wrong))


def test_rows_of_an_indexer_are_sized_by_what_it_is():
    assert SUBJECTS["indexer"].read_bytes(TOKENS, 2) == 2 * 64 * 132
    found = []
    for case in (replace(TOKENS, num_bytes=9), replace(TOKENS, num_bytes=9, requests=4), replace(BLOCKS, num_bytes=9)):
        timed = Outcome(4.0, 0.5, True, 0.0)
        found += rows.of_case(COMMON, case, "topk_64", timed, {"replicated": Outcome(8.0, 0.1, True, 0.1)}, 8000)
    assert [(row["kind"], row["context"], row["requests"], row["query_rows"]) for row in found] == [
        ("dsa", 70, 2, 3),
        ("dsa", 70, 4, 3),
        ("block_max", 300, 2, 3),
    ]
    assert {(row["rate_gb_s"], row["ratio"], row["baseline"]) for row in found} == {(2.0, 2.0, "replicated")}
    assert labels.size(found[0]) == "dsa, 2 × 3 rows, heads 16, k 5, 70 tokens"
    assert len(plot._panels(found)) == 3
    ((_, columns, lines),) = report.tables(found)
    assert columns[0] == "cache"
    assert len(lines) == 3
    assert len(compare.compare(found, found, whole=True).lines) == 6


def test_an_option_of_something_else_is_refused():
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    for words, says in (
        (["indexer", "--dtype", "bf16"], "has a --format"),
        (["indexer", "--columns", "8"], "means nothing to indexer"),
        (["topk", "--context", "8"], "means nothing to topk"),
        (["indexer", "--context", "1"], "give a longer one"),
        (["indexer", "--requests", "x"], "is not a whole number"),
    ):
        with pytest.raises(UsageError, match=says):
            options.settings(parser.parse_args(words))
