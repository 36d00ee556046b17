# SPDX-License-Identifier: Apache-2.0
"""What results are compared with."""

from __future__ import annotations

import math

import pytest
import torch

from flycomm.bench.reference import DTYPES, Verdict, error_bound, judge, make_input, rank_order_sum, worst


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_the_same_for_everybody_and_differ_by_rank_and_buffer(dtype):
    made = {(rank, buffer): make_input(rank, buffer, 64, DTYPES[dtype]) for rank in range(8) for buffer in range(4)}
    assert all(torch.equal(one, make_input(*key, 64, DTYPES[dtype])) for key, one in made.items())
    keys = list(made)
    assert not any(torch.equal(made[a], made[b]) for a in keys for b in keys if a != b)


def test_the_sum_is_made_in_f32_in_rank_order():
    big, small = torch.tensor([256.0]).bfloat16(), torch.tensor([1.0]).bfloat16()
    assert rank_order_sum([big, small, small]).item() == 258.0  # bf16 sums would stay at 256
    terms = [torch.tensor([value]) for value in (1e8, -1e8, 1.0)]
    assert rank_order_sum(terms).item() == 1.0
    assert rank_order_sum(terms[::-1]).item() == 0.0
    negative_zero = torch.tensor([-0.0])
    assert math.copysign(1.0, rank_order_sum([negative_zero, negative_zero]).item()) == 1.0  # from +0.0


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
    expected, bound = rank_order_sum(terms), error_bound(terms)
    rounded = terms[-1].clone()
    for term in terms[-2::-1]:
        rounded += term  # every intermediate rounded, in the opposite order
    assert judge(rounded, expected, bound).correct
    assert not judge(rank_order_sum(terms[:-1]), expected, bound).correct


def test_one_wrong_verdict_spoils_all():
    assert worst([Verdict(True, 0.0), Verdict(False, 2.0)]) == Verdict(False, 2.0)
    assert worst([Verdict(True, 1.0), Verdict(True, 0.5)]) == Verdict(True, 1.0)
