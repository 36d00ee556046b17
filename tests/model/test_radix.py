# SPDX-License-Identifier: Apache-2.0
"""The top-k exchange by radix: right in every interleaving, and each rule left out is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .radix import EVERYBODY, Shape, Variant, system
from .verdict import assert_finds, assert_right, name

PLAIN = Variant()

CALLS = Shape()  # a row a kernel
ROWS = Shape(kernels=(3,))  # all in one
WAVES = Shape(waves=2, rounds=(1, 1), kernels=(2,))
PASSED = Shape(rounds=(1,) * 4, kernels=(1,) * 4, lists=((0, 1), (0,), (0,)), owners=(EVERYBODY,))


@pytest.mark.parametrize(
    "shape",
    [
        CALLS,
        ROWS,
        PASSED,
        WAVES,
        replace(WAVES, kernels=(1, 1)),
        Shape(rounds=(2, 1, 3), kernels=(1, 2)),
        Shape(rounds=(1, 2, 1), kernels=(3,), owners=(0, 1, 0)),
        Shape(rounds=(1, 1, 1), kernels=(2, 1), lists=((0, 0), (), (1, 0))),
        Shape(rounds=(2, 1, 1), kernels=(2, 1), lists=((),)),
        Shape(world=3, rounds=(1, 1), kernels=(2,), lists=((0, 1, 2), (2,)), owners=(EVERYBODY, 1)),
        pytest.param(replace(WAVES, rounds=(2, 1, 1), kernels=(2, 1)), marks=pytest.mark.full),
        pytest.param(Shape(world=3, rounds=(2, 1), kernels=(2,), owners=(0, 2)), marks=pytest.mark.full),
    ],
    ids=name,
)
def test_rounds_and_lists(shape: Shape) -> None:
    assert_right(system(shape, PLAIN))
    assert_right(system(shape, replace(PLAIN, tags=5)))


def test_across_the_wrap_two_rounds_of_one_buffer_have_different_tags() -> None:
    """As in the exchange that pushes: the length of the cycle must not be 2 modulo the number of tags."""
    wraps = Shape(rounds=(2, 2, 2), kernels=(3,), lists=((),), first_epoch=9)
    assert_right(system(wraps, PLAIN))
    assert_right(system(wraps, replace(PLAIN, tags=7)))
    assert_finds(system(wraps, replace(PLAIN, tags=5)), "takes")


def test_a_kernel_of_one_row_needs_no_fence() -> None:
    assert_right(system(CALLS, replace(PLAIN, fence=False)))
    assert_right(system(replace(WAVES, kernels=(1, 1)), replace(PLAIN, fence=False)))


def test_a_reset_that_is_not_waited_for_wipes_what_comes_next() -> None:
    assert_finds(system(ROWS, replace(PLAIN, fence=False)), "stuck")


def test_one_buffer_of_histograms_is_overwritten() -> None:
    """By the next round, or, without lists, by the next row."""
    rounds = Shape(rounds=(2, 1), kernels=(2,))
    assert_finds(system(rounds, replace(PLAIN, buffers=1)), "stuck")
    assert_finds(system(replace(CALLS, lists=((),)), replace(PLAIN, buffers=1)), "stuck")


def test_a_list_that_is_not_reset_is_taken_again() -> None:
    """Rows with a shorter list pass positions over, and a tag of three comes again after three rounds."""
    assert_finds(system(PASSED, replace(PLAIN, reset=False)), "3 takes [0]")
    assert_right(system(CALLS, replace(PLAIN, reset=False)))


def test_with_a_reset_lists_need_no_tag() -> None:
    """The tag finds ranks that disagree; histograms are not reset, and need it."""
    assert_finds(system(CALLS, replace(PLAIN, compare="any")), "(2, 0) takes [(0, 0)]")


def test_a_histogram_before_the_list_has_been_taken_lets_the_next_list_in() -> None:
    assert_finds(system(WAVES, replace(PLAIN, ends=False)), "stuck")


def test_a_list_before_the_histograms_have_been_taken_is_too_early() -> None:
    assert_finds(system(WAVES, replace(PLAIN, sums=False)), "stuck")


@pytest.mark.parametrize(
    "shape",
    [
        replace(CALLS, limit=frozenset({(0, 1)})),
        replace(ROWS, limit=frozenset({(0, 1)})),
        Shape(rounds=(2, 1), kernels=(2,), limit=frozenset({(0, 0), (1, 0)})),
        Shape(rounds=(2, 1), kernels=(1, 1), lists=((),), limit=frozenset({(0, 0)})),
        Shape(rounds=(1, 1, 1), kernels=(2, 1), owners=(0, 1), limit=frozenset({(1, 0)})),
    ],
    ids=name,
)
def test_whoever_gives_up_every_success_is_right_and_all_end(shape: Shape) -> None:
    assert_right(system(shape, PLAIN))
