# SPDX-License-Identifier: Apache-2.0
"""Bounded waits: everybody ends, nobody succeeds with wrong data, and after ``recover`` all is as new."""

from __future__ import annotations

from dataclasses import replace

import pytest

from . import overlap
from .failures import Case, system
from .verdict import assert_finds, assert_right, name

ZERO = frozenset({0})
ONE = frozenset({1})


@pytest.mark.parametrize(
    "case",
    [
        Case(calls=3),
        Case(waves=2),
        Case(blocks=2, calls=1, patient=ONE),
        Case(world=3, calls=1),
        Case(world=3, patient=frozenset({1, 2})),
        pytest.param(Case(blocks=2, calls=1), marks=pytest.mark.full),
        pytest.param(Case(blocks=2, patient=ZERO), marks=pytest.mark.full),
        pytest.param(Case(world=3), marks=pytest.mark.full),
        pytest.param(
            Case(world=3, waves=2, patient=frozenset({1, 2})), marks=[pytest.mark.full, pytest.mark.timeout(600)]
        ),
    ],
    ids=name,
)
def test_whoever_gives_up_when_all_end_and_every_success_is_right(case: Case) -> None:
    """The late come at any time; any wait may or may not reach its limit."""
    assert_right(system(case))


@pytest.mark.parametrize(
    "case",
    [
        Case(calls=4, calls_per_launch=4),
        Case(calls=4, calls_per_launch=2),
        Case(calls=3, calls_per_launch=3, waves=2),
        Case(calls=3, calls_per_launch=3, blocks=2, patient=ONE, idle=frozenset({(1, 0)})),
        Case(calls=2, calls_per_launch=2, world=3, patient=frozenset({1, 2})),
        pytest.param(Case(calls=4, calls_per_launch=2, waves=2), marks=pytest.mark.full),
    ],
    ids=name,
)
def test_a_piece_in_the_middle_fails_and_those_after_it_do_nothing(case: Case) -> None:
    assert_right(system(case))
    assert_right(system(replace(case, absent=ZERO, idle=frozenset(), patient=frozenset())))


def test_pieces_after_one_that_failed_overwrite_what_a_late_peer_reads() -> None:
    assert_finds(system(Case(calls=3, calls_per_launch=3, carry=False)), "waits out a second limit")
    on = Case(calls=3, calls_per_launch=3, stop_writing=False)
    assert_finds(system(on), "call 1 succeeds with the data of calls (3,)")


def test_the_word_of_agreement_is_cleared_once_a_launch() -> None:
    """Wave 0, in the next piece, clears what wave 1 has not read: the barrier between is the next piece's."""
    case = Case(calls=2, calls_per_launch=2, waves=2)
    assert_finds(system(replace(case, zero="call")), "succeeds with the data of calls")


@pytest.mark.parametrize("world", [2, 3])
def test_all_end_when_one_rank_never_comes(world: int) -> None:
    assert_right(system(Case(world=world, absent=ZERO)))


def test_abort_ends_the_waits_of_ranks_without_a_limit() -> None:
    case = Case(world=3, absent=ZERO, patient=frozenset({2}))
    assert_right(system(case))
    assert_finds(system(replace(case, abort=False)), "stuck")


def test_abort_reaches_a_late_rank_without_a_limit() -> None:
    assert_right(system(Case(patient=ZERO)))
    assert_finds(system(Case(patient=ZERO, abort=False)), "stuck")


@pytest.mark.parametrize("world", [2, 3])
def test_a_host_that_failed_before_its_launch_sends_abort(world: int) -> None:
    patient = frozenset(range(1, world))
    assert_right(system(Case(world=world, absent=ZERO, patient=patient, host_abort=True)))
    assert_finds(system(Case(world=world, absent=ZERO, patient=patient)), "stuck")


def test_a_block_beside_the_failed_one_ends_too() -> None:
    """Rank 1's block 0 does not come, rank 0's block 0 gives up: the blocks 1 may do call 1, and are aborted later."""
    assert_right(system(Case(blocks=2, patient=ONE, idle=frozenset({(1, 0)}))))


def test_a_wave_that_does_not_hear_of_the_failure_takes_what_is_not_there() -> None:
    assert_finds(system(Case(waves=2, agree=False)), "succeeds with the data of calls")


def test_a_wave_that_leaves_out_barriers_strands_the_others() -> None:
    assert_finds(system(Case(waves=2, fall_through=False)), "stuck")


def test_a_channel_that_is_not_poisoned_waits_again() -> None:
    assert_finds(system(Case(poison="none")), "waits out a second limit")


def test_writing_on_after_a_failed_wait_overwrites_what_a_late_peer_reads() -> None:
    assert_finds(system(Case(calls=3, stop_writing=False)), "call 1 succeeds with the data of calls (3,)")


def test_poisoning_other_blocks_tears_a_block_that_is_reading_its_state() -> None:
    """One wave finds the mark and posts nothing, wave 0 does not find it and signals: the peer succeeds with old data.
    So a block marks its own state only, and stops the blocks beside it as it stops peers: by the abort word."""
    case = Case(calls=1, blocks=2, waves=2, patient=ONE, idle=frozenset({(1, 0)}))
    assert_right(system(case))
    torn = replace(case, poison="channel")
    assert_finds(system(torn), "call 1 succeeds with the data of calls (0,)")


@pytest.mark.parametrize("world", [2, 3])
def test_no_rank_of_a_call_with_unlike_arguments_succeeds(world: int) -> None:
    """Nobody has a time limit, and the word of a peer one ahead carries the next call's hash."""
    assert_right(system(Case(world=world, hashes=((0, 2, 7),), patient=frozenset(range(world)))))


@pytest.mark.parametrize(
    "case",
    [
        Case(calls=3, recover_after=1),
        Case(calls=2, recover_after=1, waves=2),
        pytest.param(Case(world=3, calls=2, recover_after=1), marks=pytest.mark.full),
    ],
    ids=name,
)
def test_after_recover_every_call_succeeds(case: Case) -> None:
    assert_right(system(case))


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (Case(calls=3, recover_after=1, drain=False), "after recover"),
        (Case(calls=3, recover_after=1, first_barrier=False), "after recover"),
        (Case(calls=2, recover_after=1, second_barrier=False), "stuck"),
    ],
    ids=["a kernel still in flight", "a peer still running", "a peer not yet reset"],
)
def test_what_breaks_recover(case: Case, fault: str) -> None:
    assert_finds(system(case), fault)


@pytest.mark.parametrize("waves", [1, 2, 3])
def test_overlapping_launches_are_noticed(waves: int) -> None:
    assert_right(overlap.system(waves, compare=True))


def test_the_swap_alone_misses_a_launch_whose_waves_read_different_epochs() -> None:
    assert_right(overlap.system(1, compare=False))
    assert_finds(overlap.system(2, compare=False), "nobody noticed")
