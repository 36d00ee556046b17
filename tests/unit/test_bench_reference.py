# SPDX-License-Identifier: Apache-2.0
"""What results are compared with."""

from __future__ import annotations

import math

import pytest
import torch

from flycomm.bench.collective import Collective
from flycomm.bench.reference import DTYPES, Verdict, error_bound, judge, make_input, reduce_in_rank_order, worst
from flycomm.errors import UsageError


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_the_same_for_everybody_and_differ_by_rank_and_buffer(dtype):
    made = {(rank, buffer): make_input(rank, buffer, 64, DTYPES[dtype]) for rank in range(8) for buffer in range(4)}
    assert all(torch.equal(one, make_input(*key, 64, DTYPES[dtype])) for key, one in made.items())
    keys = list(made)
    assert not any(torch.equal(made[a], made[b]) for a in keys for b in keys if a != b)


def test_the_sum_is_made_in_f32_in_rank_order():
    big, small = torch.tensor([256.0]).bfloat16(), torch.tensor([1.0]).bfloat16()
    assert reduce_in_rank_order([big, small, small]).item() == 258.0  # bf16 sums would stay at 256
    terms = [torch.tensor([value]) for value in (1e8, -1e8, 1.0)]
    assert reduce_in_rank_order(terms).item() == 1.0
    assert reduce_in_rank_order(terms[::-1]).item() == 0.0
    negative_zero = torch.tensor([-0.0])
    assert math.copysign(1.0, reduce_in_rank_order([negative_zero, negative_zero]).item()) == 1.0  # from +0.0


def test_bits_are_compared_and_not_values():
    zero, negative_zero = torch.tensor([0.0]), torch.tensor([-0.0])
    assert judge(zero, zero, None) == Verdict(True, 0.0)
    assert judge(negative_zero, zero, None) == Verdict(False, 0.0)
    nan = torch.tensor([math.nan])
    assert judge(nan, zero, None) == Verdict(False, math.inf)
    assert judge(nan, zero, torch.tensor([1.0])) == Verdict(False, math.inf)
    assert judge(torch.tensor([1.5, 0.0]), torch.tensor([1.0, 0.0]), None) == Verdict(False, 0.5)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("world", [2, 5, 8])
def test_any_order_and_rounding_is_within_the_bound_and_a_lost_rank_is_not(dtype, world):
    terms = [make_input(rank, 0, 4096, DTYPES[dtype]) for rank in range(world)]
    expected, bound = reduce_in_rank_order(terms), error_bound(terms)
    rounded = terms[-1].clone()
    for term in terms[-2::-1]:
        rounded += term  # every intermediate rounded, in the opposite order
    assert judge(rounded, expected, bound).correct
    assert not judge(reduce_in_rank_order(terms[:-1]), expected, bound).correct


def test_one_wrong_verdict_spoils_all():
    assert worst([Verdict(True, 0.0), Verdict(False, 2.0)]) == Verdict(False, 2.0)
    assert worst([Verdict(True, 1.0), Verdict(True, 0.5)]) == Verdict(True, 1.0)


def test_averages_are_divided_in_f32_and_rounded_once():
    terms = [torch.tensor([value]).half() for value in (1.0, 2.0, 2.0)]
    assert reduce_in_rank_order(terms, "avg").item() == torch.tensor(5 / 3).half().item()
    large = torch.tensor([60000.0]).half()
    assert reduce_in_rank_order([large] * 3, "avg").item() == large.item()  # the sum would be infinite in f16
    assert reduce_in_rank_order([large] * 3, "sum").item() == math.inf


def test_the_largest_and_the_smallest_are_the_terms_own_bits():
    terms = [torch.tensor(values).bfloat16() for values in ([1.0, -2.0], [3.0, -4.0], [2.0, 5.0])]
    assert reduce_in_rank_order(terms, "max").tolist() == [3.0, 5.0]
    assert reduce_in_rank_order(terms, "min").tolist() == [1.0, -4.0]
    assert error_bound(terms, "max").tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_any_way_to_average_is_within_the_bound_and_a_sum_is_not(dtype, world):
    terms = [make_input(rank, 0, 4096, DTYPES[dtype]) for rank in range(world)]
    expected, bound = reduce_in_rank_order(terms, "avg"), error_bound(terms, "avg")
    scaled = [term * (1 / world) for term in terms]  # rounded before the sum, as a library may
    rounded = scaled[-1].clone()
    for term in scaled[-2::-1]:
        rounded += term
    assert judge(rounded, expected, bound).correct
    assert not judge(reduce_in_rank_order(terms), expected, bound).correct
    assert bool((bound < error_bound(terms, "sum")).all()), "an average loses less than a sum"


INPUTS = [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([10.0, 20.0, 30.0, 40.0])]


@pytest.mark.parametrize(
    ("what", "reduction", "rank", "result"),
    [
        ("all_reduce", None, 1, [11.0, 22.0, 33.0, 44.0]),
        ("all_reduce", "max", 0, [10.0, 20.0, 30.0, 40.0]),
        ("all_gather", None, 1, [1.0, 2.0, 3.0, 4.0, 10.0, 20.0, 30.0, 40.0]),
        ("reduce_scatter", None, 0, [11.0, 22.0]),
        ("reduce_scatter", "avg", 1, [16.5, 22.0]),
    ],
)
def test_what_a_rank_must_have_in_the_end(what, reduction, rank, result):
    collective = Collective.of(what, reduction)
    assert collective.expected(INPUTS, rank).tolist() == result
    assert collective.empty_output(INPUTS[rank], 2).numel() == len(result)
    bound = collective.bound(INPUTS, rank)
    assert bound is None if what == "all_gather" else bound is not None and bound.numel() == len(result)


def test_a_share_is_the_message_of_an_all_reduce_and_a_shard_of_the_others():
    shapes = {
        name: (Collective.of(name, None).input_numel(6, 4), Collective.of(name, None).output_numel(6, 4))
        for name in ("all_reduce", "all_gather", "reduce_scatter")
    }
    assert shapes == {"all_reduce": (6, 6), "all_gather": (6, 24), "reduce_scatter": (24, 6)}


def test_only_what_reduces_has_a_reduction():
    assert Collective.of("reduce_scatter", None).reduction == "sum"
    assert Collective.of("all_gather", None).reduction is None
    with pytest.raises(UsageError, match="means nothing to all_gather"):
        Collective.of("all_gather", "sum")
    with pytest.raises(UsageError, match="avg, max, min"):
        Collective.of("all_reduce", "median")
