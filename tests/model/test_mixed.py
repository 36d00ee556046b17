# SPDX-License-Identifier: Apache-2.0
"""Several operations on one flag channel, some in pieces: right in any order; what they must have alike is found."""

from __future__ import annotations

from itertools import permutations

import pytest

from .mixed import Shape, Variant, one_shot, pull, scatter, system, two_shot
from .verdict import assert_finds, assert_right

PROTOCOL = Variant()
MIXED = (one_shot(2, 1), two_shot(3), scatter(1), pull(), one_shot(1))


@pytest.mark.parametrize(
    "shape",
    [
        Shape(MIXED),
        Shape(MIXED, waves=2),
        Shape(MIXED, waves=2, cumulative=True),
        Shape((two_shot(4, 1), pull(3), scatter(2, 1), two_shot(1)), waves=2),
        Shape((one_shot(2), pull(1), two_shot(3), scatter(2)), blocks=2),
        Shape((two_shot(3, 1), one_shot(1), scatter(1)), world=3),
        Shape((scatter(1, 1), pull(), two_shot(2)), world=3),
    ],
    ids=["mixed", "two waves", "cumulative", "pieces", "two blocks", "three ranks", "three ranks, empty slices"],
)
def test_operations_share_a_channel(shape: Shape) -> None:
    assert_right(system(shape, PROTOCOL))


def test_in_every_order() -> None:
    for launches in permutations((one_shot(1, 1), two_shot(1), scatter(1), pull(1))):
        assert_right(system(Shape(launches), PROTOCOL))


@pytest.mark.parametrize("first", range(7, 13))
def test_across_the_wrap(first: int) -> None:
    assert_right(system(Shape(MIXED, first_epoch=first), PROTOCOL))


def test_a_rank_with_an_empty_slice_in_a_short_last_piece() -> None:
    """It gets nothing in the first phase and sends nothing in the second; it signals and waits in both."""
    for world in (2, 3):
        shape = Shape((two_shot(world, 1), two_shot(1, 1)), world=world)
        assert_right(system(shape, PROTOCOL))
        assert_finds(system(shape, Variant(empty="leaves")), "takes")


def test_a_buffer_that_each_operation_counts_for_itself_is_one_buffer() -> None:
    assert_finds(system(Shape((one_shot(1), scatter(1))), Variant(buffer="operation")), "call 1 takes ((2, 0),)")


def test_a_buffer_for_each_phase_of_two_shot_is_another_operations_too() -> None:
    """Alone on a channel it alternates as the epoch does; after other calls it need not."""
    phases = Variant(buffer="phase")
    assert_right(system(Shape((two_shot(2), two_shot(2, 2)), first_epoch=12), phases))
    assert_finds(system(Shape((one_shot(1, 1), two_shot(2))), phases), "takes")


def test_a_launch_of_several_calls_moves_the_state_on_by_all_of_them() -> None:
    assert_finds(system(Shape((one_shot(1, 1), one_shot(1))), Variant(advance="first")), "call 3 takes")


def test_two_grids_are_two_channels() -> None:
    """Slot 1 is block 0's in the small grid and block 1's in the large one, whose epoch says another buffer."""
    small = one_shot(2)._replace(blocks=1)
    assert_right(system(Shape((one_shot(2), one_shot(2)), blocks=2), PROTOCOL))
    assert_finds(system(Shape((small, one_shot(2)), blocks=2), PROTOCOL), "takes")
