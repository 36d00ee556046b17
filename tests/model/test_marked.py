# SPDX-License-Identifier: Apache-2.0
"""One-shot with packets and with sentinels: right in every interleaving, and each rule left out is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .marked import SENTINEL, Shape, Variant, system
from .verdict import assert_finds, assert_right, name

PACKETS = Variant()
BOTH = pytest.mark.parametrize("protocol", [PACKETS, SENTINEL], ids=["packets", "sentinel"])

ONE = Shape(blocks=1, lengths=(1, 1, 1, 1))  # one slot, always in use
RESTS = Shape()  # slot 1 has data in the first and the last call only
KERNEL = Shape(lengths=(2, 2, 2, 2), calls_per_launch=4)


@BOTH
@pytest.mark.parametrize(
    "shape",
    [
        RESTS,
        Shape(lengths=(1, 2, 1, 2)),
        Shape(lengths=(2, 1, 2, 1, 1, 2)),
        Shape(blocks=3, lengths=(3, 1, 2, 3)),
        Shape(halves=2, lengths=(2, 1, 2), partial=frozenset({1, 3})),
        Shape(blocks=1, threads=2),
        Shape(blocks=1, threads=2, lengths=(2, 1, 2, 1), first_epoch=10),
        Shape(lengths=(2, 1, 1, 2, 2), first_epoch=9),
        replace(ONE, world=3),
        pytest.param(Shape(threads=2, lengths=(3, 1, 3)), marks=pytest.mark.full),
        pytest.param(Shape(world=3, lengths=(1, 2)), marks=[pytest.mark.full, pytest.mark.timeout(600)]),
    ],
    ids=name,
)
def test_the_protocol_holds(protocol: Variant, shape: Shape) -> None:
    """Blocks run ahead of each other as far as kernels let them, and slots rest."""
    assert_right(system(shape, protocol))


def test_slots_of_three_ranks_rest() -> None:
    assert_right(system(Shape(world=3, lengths=(2, 1, 2)), PACKETS))
    assert_right(system(Shape(world=3, blocks=1, halves=2, lengths=(1, 1)), PACKETS))


@BOTH
@pytest.mark.parametrize("scatters", [{1, 3}, {2, 4}, {2, 3}], ids=str)
def test_scatters_and_all_reduces_share_a_channel(protocol: Variant, scatters: set[int]) -> None:
    assert_right(system(replace(RESTS, scatters=frozenset(scatters)), protocol))
    assert_right(system(replace(ONE, world=3, lengths=(1, 1, 1), scatters=frozenset(scatters)), protocol))


@BOTH
def test_a_scatter_in_which_a_rank_gets_nothing(protocol: Variant) -> None:
    """Its chunk has no fragment, nobody sends it one, and it waits for nobody."""
    third = 3 if protocol.clear else 2
    shape = replace(ONE, scatters=frozenset({third}))
    assert_finds(system(shape, replace(protocol, uneven=frozenset({(0, third)}))), "stuck")


@BOTH
def test_a_call_in_which_a_rank_waits_for_nobody(protocol: Variant) -> None:
    assert_finds(system(ONE, replace(protocol, nobody=frozenset({(0, 3 if protocol.clear else 2)}))), "stuck")


@BOTH
@pytest.mark.parametrize("world", [2, 3])
def test_a_call_without_data_counts_for_nothing_unless_it_sends_something(protocol: Variant, world: int) -> None:
    """What waits for nobody is the whole rank: a launch with a count of zero."""
    shape = replace(ONE, world=world, lengths=(1, 1, 0, 1) if protocol.clear else (1, 0, 1))
    assert_finds(system(shape, protocol), "stuck")
    assert_right(system(shape, replace(protocol, idle="empty")))


@BOTH
def test_the_state_is_not_advanced_before_every_thread_has_read_it(protocol: Variant) -> None:
    assert_finds(system(Shape(blocks=1, threads=2), replace(protocol, barrier="none")), "stuck")


@BOTH
def test_a_wait_that_never_waits(protocol: Variant) -> None:
    assert_finds(system(ONE, replace(protocol, compare="never")), "call 1 takes the data of calls (0,)")


# ---- packets: the tag makes a success right, the second buffer makes sure of one


def test_one_buffer_is_overwritten_and_never_seen() -> None:
    assert_finds(system(ONE, Variant(buffers=1)), "stuck")


def test_a_tag_that_is_only_reached_takes_what_came_later() -> None:
    early = Variant(nobody=frozenset({(0, 2)}), compare="reached")
    assert_finds(system(ONE, early), "call 1 takes the data of calls (3,)")


def test_a_tag_that_is_only_reached_takes_what_has_rested_for_half_a_cycle() -> None:
    """The same message, longer after a while; the words of slot 1 are 10 calls old, in words of 4 bits."""
    rests = Shape(lengths=(1, 2, *[1] * 9, 2))
    assert_right(system(rests, PACKETS))
    assert_finds(system(rests, Variant(compare="reached")), "call 12 takes the data of calls (2,)")


def test_a_narrow_tag_comes_round_while_a_slot_rests() -> None:
    rests = Shape(lengths=(2, 1, 1, 1, 2))
    assert_right(system(rests, PACKETS))
    assert_finds(system(rests, Variant(tag_bits=2)), "call 5 takes the data of calls (1,)")


def test_so_does_a_whole_one_after_exactly_one_cycle_unless_every_slot_is_used_now_and_then() -> None:
    rests = Shape(lengths=(2, *[1] * 11, 2))
    assert_finds(system(rests, PACKETS), "call 13 takes the data of calls (1,)")
    for start in range(1, 13):
        assert_right(system(replace(rests, first_epoch=start), Variant(refresh=4)))


def test_every_word_of_a_packet_has_a_tag_of_its_own() -> None:
    assert_finds(system(replace(ONE, halves=2), Variant(compare="first")), "call 1 takes the data of calls (1, 0)")


def test_padding_that_is_not_sent_is_waited_for() -> None:
    shape = replace(ONE, halves=2, partial=frozenset({1}))
    assert_finds(system(shape, Variant(padding="unsent")), "stuck")


def test_padding_that_nobody_waits_for_does_no_harm_under_a_tag() -> None:
    for shape in (Shape(halves=2, lengths=(2, 1, 2)), Shape(halves=2, lengths=(2, 2, 2), calls_per_launch=3)):
        assert_right(system(replace(shape, partial=frozenset({1})), Variant(padding="unwaited")))


# ---- sentinels: what has not arrived is not data


def test_padding_that_nobody_waits_for_lands_after_the_clear_and_is_data() -> None:
    shape = replace(ONE, halves=2, partial=frozenset({1}))
    assert_right(system(shape, SENTINEL))
    assert_finds(system(shape, replace(SENTINEL, padding="unwaited")), "call 4 takes the data of calls (4, 1)")


def test_clearing_the_next_buffer_wipes_what_a_peer_one_ahead_has_written() -> None:
    assert_finds(system(ONE, replace(SENTINEL, clear=1)), "stuck")


def test_two_buffers_leave_none_to_clear() -> None:
    assert_finds(system(ONE, replace(SENTINEL, buffers=2, clear=1)), "stuck")


def test_what_is_not_cleared_is_data() -> None:
    assert_finds(system(ONE, replace(SENTINEL, clear=0)), "call 4 takes the data of calls (1,)")


def test_clearing_as_far_as_this_call_is_long_leaves_the_rest_of_a_longer_one() -> None:
    assert_finds(system(RESTS, replace(SENTINEL, dirty="current")), "call 4 takes the data of calls (1,)")


def test_each_operation_clearing_what_it_filled_itself_leaves_what_the_other_filled() -> None:
    mixed = replace(RESTS, scatters=frozenset({2}))
    assert_right(system(mixed, SENTINEL))
    assert_finds(system(mixed, replace(SENTINEL, dirty="operation")), "call 4 takes the data of calls (1,)")


def test_data_that_is_the_sentinel_never_arrives() -> None:
    minus_zero = replace(SENTINEL, minus_zero=frozenset({2}))
    assert_right(system(ONE, minus_zero))
    assert_finds(system(ONE, replace(minus_zero, sanitise=False)), "stuck")


# ---- several calls in one kernel


@BOTH
@pytest.mark.parametrize(
    "shape",
    [
        KERNEL,
        replace(KERNEL, lengths=(2,) * 5, calls_per_launch=2, first_epoch=10),
        replace(ONE, world=3, lengths=(1, 1, 1), calls_per_launch=3),
    ],
    ids=name,
)
def test_threads_that_take_part_in_every_call_need_no_kernel_between(protocol: Variant, shape: Shape) -> None:
    assert_right(system(shape, protocol))


@BOTH
def test_a_thread_that_skips_a_call_of_a_kernel_overwrites_unless_it_sends_something(protocol: Variant) -> None:
    shape = replace(KERNEL, lengths=(2, 2, 1, 2))
    assert_finds(system(shape, protocol), "stuck")
    assert_right(system(shape, replace(protocol, idle="empty")))


def test_which_calls_a_thread_may_skip() -> None:
    """Packets: as many as leave the next use in the other buffer. Sentinels: none, though some orders of calls pass."""
    assert_finds(system(replace(KERNEL, lengths=(2, 1, 2)), PACKETS), "stuck")
    assert_right(system(replace(KERNEL, lengths=(2, 1, 1, 2)), PACKETS))
    assert_right(system(replace(KERNEL, lengths=(2, 1, 2, 2)), SENTINEL))
    assert_finds(system(replace(KERNEL, lengths=(2, 1, 1, 2)), SENTINEL), "call 1 takes the data of calls (4,)")


def test_counting_the_uses_of_a_slot_lets_packets_skip() -> None:
    shape = Shape(lengths=(2, 2, 1, 2, 1, 1, 2), calls_per_launch=7)
    assert_finds(system(shape, PACKETS), "stuck")
    assert_right(system(shape, Variant(counts="uses")))


def test_meeting_after_the_takes_makes_the_block_the_unit() -> None:
    """The barrier between posts and takes does not, and blocks do not meet."""
    one_block = Shape(blocks=1, threads=2, lengths=(2, 2, 1, 2), calls_per_launch=4)
    assert_finds(system(one_block, PACKETS), "stuck")
    assert_right(system(one_block, Variant(barrier="takes")))
    assert_finds(system(replace(one_block, blocks=2, threads=1), Variant(barrier="takes")), "stuck")


def test_a_kernel_of_two_calls_is_not_two_kernels() -> None:
    """Slot 1 has data in calls 2 and 4; a kernel ends between them, but not after call 3."""
    alternates = Shape(lengths=(1, 2, 1, 2))
    assert_right(system(alternates, PACKETS))
    assert_finds(system(replace(alternates, calls_per_launch=2), PACKETS), "stuck")


@BOTH
def test_a_slot_that_another_thread_takes_over_is_overwritten(protocol: Variant) -> None:
    shape = Shape(lengths=(2, 2, 2))
    assert_right(system(shape, replace(protocol, moves=True)))  # a kernel ends in between
    assert_finds(system(replace(shape, calls_per_launch=3), replace(protocol, moves=True)), "stuck")


def test_without_a_fence_a_clear_lands_after_what_a_peer_posts_next() -> None:
    assert_finds(system(replace(ONE, calls_per_launch=4), replace(SENTINEL, fence=False)), "stuck")


# ---- failures

LATE = Shape(limit=frozenset({(0, 2)}))  # rank 0 may give up in call 2, where its block 1 waits for nobody


@BOTH
@pytest.mark.parametrize(
    "limit",
    [
        frozenset({(0, 2)}),
        pytest.param(frozenset({(0, 2), (1, 2)}), marks=pytest.mark.full),
        pytest.param(frozenset((0, call) for call in (1, 2, 3, 4)), marks=[pytest.mark.full, pytest.mark.timeout(600)]),
    ],
    ids=["rank 0 in call 2", "both ranks in call 2", "rank 0 in any call"],
)
def test_whoever_gives_up_every_success_is_right_and_all_end(
    protocol: Variant, limit: frozenset[tuple[int, int]]
) -> None:
    assert_right(system(replace(LATE, limit=limit), protocol))


def test_a_block_at_rest_beside_a_failed_one_overwrites_what_a_late_peer_takes() -> None:
    """Block 0 gave up in call 2; calls 2 and 3 hold nothing for block 1, so nothing stops it from posting in call 4."""
    assert_finds(system(LATE, replace(SENTINEL, silent="block")), "call 1 takes the data of calls (4,)")


@pytest.mark.full
def test_under_a_tag_what_it_overwrites_is_not_taken() -> None:
    assert_right(system(LATE, replace(PACKETS, silent="block")))


@BOTH
def test_who_is_silent_because_of_anothers_abort_leaves_no_record(protocol: Variant) -> None:
    """A rank that is late has not failed in a wait: it would go on without sums, and nobody would tell its user."""
    assert_finds(system(LATE, replace(protocol, silent="abort")), "rank 1 has no sum and no record says so")
