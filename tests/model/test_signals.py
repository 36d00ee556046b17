# SPDX-License-Identifier: Apache-2.0
"""The barrier kernel and put/wait signals."""

from __future__ import annotations

import pytest

from .flags import Shape, Variant, system
from .signals import barrier, opposite, stream
from .verdict import assert_finds, assert_right, name


@pytest.mark.parametrize(
    "shape",
    [
        Shape(calls=4),
        Shape(waves=2, calls=3),
        Shape(blocks=2, calls=2),
        Shape(world=3, calls=3),
        Shape(calls=5, first_epoch=10),
        pytest.param(Shape(world=4, calls=2), marks=pytest.mark.full),
    ],
    ids=name,
)
def test_nobody_leaves_a_barrier_before_all_have_come(shape: Shape) -> None:
    assert_right(system(shape, Variant(), barrier))


@pytest.mark.parametrize(
    ("shape", "variant", "fault"),
    [
        (Shape(), Variant(wait="equal"), "stuck"),
        (Shape(), Variant(wait="never"), "is left while"),
        (Shape(waves=2), Variant(arrive_barrier=False), "is left while"),
        (Shape(waves=2), Variant(take_barrier=False), "is left while"),
        (Shape(blocks=2, calls=1), Variant(state="channel"), "stuck"),
    ],
    ids=["equality", "no wait", "no barrier before the flag", "no barrier after the wait", "one state word"],
)
def test_what_breaks_a_barrier(shape: Shape, variant: Variant, fault: str) -> None:
    assert_finds(system(shape, variant, barrier), fault)


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_counted_signals_carry_a_stream_of_messages(buffers: int) -> None:
    assert_right(stream(messages=6, buffers=buffers, credit=True))


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_a_stream_without_a_signal_back_overwrites(buffers: int) -> None:
    last = buffers + 1
    assert_finds(stream(messages=last, buffers=buffers, credit=False), f"call 1 takes the data of calls ({last},)")


def test_a_wait_for_equality_misses_a_signal_that_the_next_one_overwrote() -> None:
    assert_finds(stream(messages=2, buffers=2, credit=True, compare="equal"), "stuck")


def test_a_flag_that_the_reader_clears_loses_one_of_two_signals() -> None:
    assert_right(stream(messages=3, buffers=1, credit=True, compare="flag"))  # never two in flight
    assert_finds(stream(messages=2, buffers=2, credit=True, compare="flag"), "stuck")


def test_how_far_a_put_may_run_ahead_of_its_wait_across_the_wrap() -> None:
    """2**(bits - 1) - 5 = 3 signals: with 4 buffers the put is at most 3 ahead of the count waited for."""
    assert_right(stream(messages=8, buffers=4, credit=True, first=9))
    assert_finds(stream(messages=8, buffers=5, credit=True, first=9), "stuck")


def test_two_channels_in_opposite_order_on_two_ranks_are_stuck() -> None:
    """Rule 12, with room for one waiting kernel at a time."""
    assert_right(opposite(("a", "b"), ("a", "b")))
    assert_finds(opposite(("a", "b"), ("b", "a")), "stuck")
