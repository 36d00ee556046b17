# SPDX-License-Identifier: Apache-2.0
"""Ready marks: right in every interleaving, and each rule left out is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .ready import Shape, Variant, system
from .verdict import assert_finds, assert_right, name

MARKS = Variant()
# sm_90: barrier and release order the stores of the whole block, no wave waits for its own
CUMULATIVE = Variant(wave_wait=False)
STALE = "reads tiles of calls"
LAYERS = Shape(calls=4, calls_per_launch=4)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(waves=2),
        Shape(blocks=3, calls=2),
        LAYERS,
        Shape(waves=2, calls=4, calls_per_launch=2),
        Shape(blocks=3, calls=3, calls_per_launch=3),
        Shape(calls=4, calls_per_launch=2, early_loads=True),
        Shape(calls=5, calls_per_launch=5, first_epoch=10),
        Shape(blocks=3, waves=2, calls=2, calls_per_launch=2),
    ],
    ids=name,
)
def test_the_protocol_holds(shape: Shape) -> None:
    assert_right(system(shape, MARKS))


@pytest.mark.parametrize("shape", [Shape(waves=2), replace(LAYERS, waves=2, calls=3)], ids=name)
def test_it_holds_where_release_is_cumulative(shape: Shape) -> None:
    assert_right(system(replace(shape, cumulative=True), CUMULATIVE))


def _rests(calls: int) -> Shape:
    """Block 1 makes no tile between the first and the last of so many calls."""
    return Shape(calls=calls, rests=frozenset((1, call) for call in range(2, calls)))


def test_what_rests_is_of_another_call_and_comes_again() -> None:
    """Also over half a cycle of epochs: 10 of 12, in words of 4 bits, is more than half and looks arrived."""
    for calls in (4, 7, 11):
        assert_right(system(_rests(calls), MARKS))
    assert_right(system(_rests(7), Variant(compare="arrived")))
    assert_finds(system(_rests(11), Variant(compare="arrived")), STALE)


def test_after_a_cycle_less_one_a_mark_looks_ahead() -> None:
    assert_finds(system(_rests(12), MARKS), STALE)
    assert_finds(system(_rests(13), MARKS), STALE)


@pytest.mark.parametrize("first", [0, 6, 8, 11])
def test_new_marks_on_a_channel_that_has_long_been_used(first: int) -> None:
    """Zeros, as ``reset`` leaves them too: no epoch is 0."""
    new = Shape(first_epoch=first, marks=0)
    assert_right(system(new, MARKS))
    by_sign = system(new, Variant(compare="arrived"))
    if first < 8:
        assert_right(by_sign)
    else:
        assert_finds(by_sign, STALE)


def test_without_the_per_wave_wait_another_waves_part_is_in_flight() -> None:
    assert_finds(system(Shape(waves=2, calls=1), CUMULATIVE), STALE)
    assert_right(system(Shape(calls=3), CUMULATIVE))  # one wave: its release waits for its own stores


def test_without_the_barrier_of_a_mark_another_waves_part_is_late() -> None:
    assert_finds(system(Shape(waves=2, calls=1), Variant(mark_barrier=False)), STALE)


def test_without_release_the_mark_overtakes_the_tile() -> None:
    relaxed = Variant(release=False, wave_wait=False)
    assert_finds(system(Shape(calls=1), relaxed), STALE)
    assert_finds(system(Shape(waves=2, calls=1, cumulative=True), relaxed), STALE)


@pytest.mark.parametrize("reset", ["start", "waited"])
def test_a_reset_inside_a_launch_wipes_a_mark_that_somebody_waits_for(reset: str) -> None:
    assert_finds(system(Shape(blocks=3, calls=1), Variant(reset=reset)), "stuck")


def test_equality_hangs_when_a_block_is_one_call_ahead() -> None:
    assert_finds(system(LAYERS, Variant(compare="equal")), "stuck")
    assert_right(system(Shape(), Variant(compare="equal")))  # a launch a call: nobody can be ahead


def test_a_count_of_marks_is_not_an_epoch_where_something_rests_or_epochs_wrap() -> None:
    count = Variant(holds="count")
    assert_right(system(Shape(), count))
    assert_finds(system(Shape(calls=3, rests=frozenset({(1, 2)})), count), "stuck")
    assert_finds(system(Shape(calls=3, first_epoch=11), count), "stuck")


def test_without_acquire_an_early_load_is_stale() -> None:
    assert_finds(system(Shape(early_loads=True), Variant(acquire=False)), STALE)


def test_without_the_barrier_after_the_wait_another_wave_reads_too_soon() -> None:
    assert_finds(system(Shape(waves=2, calls=1), Variant(read_barrier=False)), STALE)


def test_a_mark_does_not_say_that_anybody_has_read() -> None:
    """One buffer is written again too soon; so is any number by a block that waits for nobody, in one launch."""
    assert_finds(system(LAYERS, Variant(buffers=1)), STALE)
    assert_right(system(Shape(), Variant(buffers=1)))  # a launch a call: its end is the wait
    for buffers in (2, 3):
        runs_ahead = Variant(only_mark=frozenset({0}), buffers=buffers)
        assert_finds(system(replace(LAYERS, calls=buffers + 1), runs_ahead), STALE)
