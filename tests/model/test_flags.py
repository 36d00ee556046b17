# SPDX-License-Identifier: Apache-2.0
"""One-shot with flags: the protocol holds in every interleaving, and each rule left out is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .flags import Epochs, Shape, Variant, system
from .verdict import assert_finds, assert_right, name

PROTOCOL = Variant()
# sm_90: stores of the whole block are ordered by barrier and release, no wait of a wave's own
CUMULATIVE = Variant(wave_wait=False)
# gfx942 and gfx950: the flag itself needs no release where every wave has waited for its own stores
WAITED = Variant(release=False)

STALE = "takes the data of calls"


@pytest.mark.parametrize(
    "shape",
    [
        Shape(calls=4),
        Shape(waves=2, calls=4),
        Shape(blocks=2, calls=3),
        Shape(world=3, calls=4),
        Shape(world=3, waves=2, calls=2),
        Shape(waves=2, calls=4, calls_per_launch=4),
        Shape(world=3, calls=4, calls_per_launch=2),
        Shape(calls=4, early_loads=True),
        pytest.param(Shape(blocks=2, waves=2, calls=3), marks=pytest.mark.full),
        pytest.param(Shape(world=3, waves=2, calls=4), marks=pytest.mark.full),
        pytest.param(Shape(world=3, blocks=2, calls=2), marks=[pytest.mark.full, pytest.mark.timeout(600)]),
        pytest.param(Shape(world=4, calls=3), marks=pytest.mark.full),
        pytest.param(Shape(waves=2, calls=3, early_loads=True), marks=pytest.mark.full),
    ],
    ids=name,
)
def test_the_protocol_holds(shape: Shape) -> None:
    assert_right(system(shape, PROTOCOL))


@pytest.mark.parametrize("shape", [Shape(waves=2, calls=4), Shape(waves=2, calls=4, calls_per_launch=4)], ids=name)
def test_it_holds_on_each_machine(shape: Shape) -> None:
    assert_right(system(shape, WAITED))
    cumulative = replace(shape, cumulative=True)
    assert_right(system(cumulative, CUMULATIVE))
    assert_right(system(cumulative, PROTOCOL))


def test_one_buffer_is_overwritten() -> None:
    assert_finds(system(Shape(), Variant(buffers=1)), "call 1 takes the data of calls (2,)")


def test_three_buffers_hold_too() -> None:
    assert_right(system(Shape(calls=5), Variant(buffers=3)))


def test_equality_hangs_when_the_peer_is_one_ahead() -> None:
    assert_finds(system(Shape(), Variant(wait="equal")), "stuck")


def test_a_wait_that_never_waits_takes_what_is_not_there() -> None:
    assert_finds(system(Shape(calls=1), Variant(wait="never")), STALE)


def test_one_state_word_for_all_blocks_takes_the_wrong_buffer() -> None:
    """It also hangs: test_signals.py shows that with the barrier, which has no data to go wrong first."""
    assert_finds(system(Shape(blocks=2, calls=1), Variant(state="channel")), STALE)


def test_without_the_per_wave_wait_the_other_waves_data_is_in_flight() -> None:
    assert_finds(system(Shape(waves=2, calls=1), CUMULATIVE), STALE)
    assert_right(system(Shape(waves=1, calls=3), CUMULATIVE))  # one wave: nobody else's data


def test_without_release_the_flag_overtakes_the_data() -> None:
    relaxed = Variant(release=False, wave_wait=False)
    assert_finds(system(Shape(calls=1), relaxed), STALE)
    assert_finds(system(Shape(waves=2, calls=1, cumulative=True), relaxed), STALE)


def test_without_acquire_an_early_load_is_stale() -> None:
    assert_finds(system(Shape(early_loads=True), Variant(acquire=False)), STALE)


def test_without_the_barrier_before_the_flag_another_waves_data_is_late() -> None:
    assert_finds(system(Shape(waves=2, calls=1), Variant(arrive_barrier=False)), STALE)


def test_without_the_barrier_after_the_wait_another_wave_takes_too_soon() -> None:
    assert_finds(system(Shape(waves=2, calls=1), Variant(take_barrier=False)), STALE)


@pytest.mark.parametrize("buffers", [2, 3, 4])
def test_a_rank_that_only_sends_runs_ahead_of_any_number_of_buffers(buffers: int) -> None:
    sender = Variant(only_send=frozenset({0}), buffers=buffers)
    assert_finds(system(Shape(calls=buffers + 1), sender), f"takes the data of calls ({buffers + 1},)")


def test_parity_of_something_else_than_the_epoch_is_one_buffer() -> None:
    assert_finds(
        system(Shape(calls=4, calls_per_launch=2), Variant(parity="launch")), "call 1 takes the data of calls (2,)"
    )


def test_a_launch_that_reads_the_state_at_every_call_needs_a_barrier_after_its_write() -> None:
    shape = Shape(waves=2, calls=3, calls_per_launch=3)
    assert_finds(system(shape, Variant(begin="call")), STALE)
    assert_right(system(shape, Variant(begin="call", finish_barrier=True)))


# Epochs 1 … 12 in words of 4 bits stand for 1 … 2**32 - 4 in words of 32: 4 less than a power of two, a multiple of 6.


@pytest.mark.parametrize("first", [9, 10, 11, 12])
@pytest.mark.parametrize("buffers", [2, 3])
def test_the_protocol_holds_across_the_wrap(first: int, buffers: int) -> None:
    assert_right(system(Shape(calls=5, first_epoch=first), Variant(buffers=buffers)))
    assert_right(system(Shape(world=3, calls=3, first_epoch=first), Variant(buffers=buffers)))


def test_a_whole_cycle() -> None:
    assert_right(system(Shape(waves=2, calls=26), PROTOCOL))


@pytest.mark.parametrize(("last", "buffers"), [(11, 2), (10, 3)])
def test_a_cycle_that_breaks_the_parity_uses_one_buffer_twice(last: int, buffers: int) -> None:
    broken = Variant(epochs=Epochs(last=last), buffers=buffers)
    assert_finds(system(Shape(calls=5, first_epoch=last - 2), broken), STALE)


def test_counting_calls_by_the_difference_of_words_reports_a_desync_at_the_wrap() -> None:
    assert_finds(system(Shape(calls=5, first_epoch=10), Variant(in_step="raw")), "desync: at call 12, seen 1")
    assert_right(system(Shape(calls=5, first_epoch=4), Variant(in_step="raw")))


def test_pads_left_at_zero_look_like_arrival_once_epochs_are_past_half() -> None:
    shape = Shape(calls=2, first_epoch=10)
    case = system(shape, PROTOCOL)
    zeroed = {word: 0 if "pad" in word else value for word, value in case.memory.items()}
    assert_finds(replace(case, memory=zeroed), "desync: at call 11, seen 0")
