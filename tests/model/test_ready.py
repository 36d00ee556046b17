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


def test_what_rests_is_behind_and_comes_again() -> None:
    """Also over half a cycle of epochs: 10 of 12, in words of 4 bits, is more than half and looks arrived."""
    rests = frozenset({(1, 2), (1, 3)})
    assert_right(system(Shape(calls=4, rests=rests), MARKS))
    long = Shape(calls=7, rests=frozenset((1, call) for call in range(2, 7)))
    assert_right(system(long, MARKS))
    too_long = Shape(calls=11, rests=frozenset((1, call) for call in range(2, 11)))
    assert_finds(system(too_long, MARKS), STALE)


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
