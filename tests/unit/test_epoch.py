# SPDX-License-Identifier: Apache-2.0
"""Epoch arithmetic, on host integers and on the word types of kernels, most of all around the wrap."""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flycomm.epoch import EPOCH_LAST, arrived, in_step, next_epoch, previous_epoch

WORD = 1 << 32
HALF = 1 << 31
AHEAD, BEHIND = HALF - 5, HALF - 4  # how far apart two epochs may be, in calls

near_the_wrap = st.integers(EPOCH_LAST - 40, EPOCH_LAST) | st.integers(1, 40)
near_half = st.integers(HALF - 40, HALF + 40)
epochs = near_the_wrap | near_half | st.integers(1, EPOCH_LAST)
kinds = st.sampled_from([int, fx.Uint32, fx.Int32])


def plain(value: Any) -> int:
    """The unsigned word, or the truth value, in whatever type the arithmetic was done."""
    return int(getattr(value, "value", value)) % WORD


def after(e: int, calls: int) -> int:
    """The epoch ``calls`` calls later: plain counting modulo the cycle, no words."""
    return (e - 1 + calls) % EPOCH_LAST + 1


def test_the_cycle_keeps_two_and_three_buffers_in_step() -> None:
    assert EPOCH_LAST == WORD - 4
    assert EPOCH_LAST % 6 == 0


@given(epochs, kinds)
@example(EPOCH_LAST, fx.Uint32)
@example(EPOCH_LAST, fx.Int32)
@example(HALF - 1, fx.Int32)
def test_next_and_previous(e: int, kind: Any) -> None:
    following = plain(next_epoch(kind(e)))
    assert following == after(e, 1)
    assert plain(previous_epoch(kind(following))) == e
    assert plain(previous_epoch(kind(e))) == after(e, -1)
    assert (following - e) % 2 == 1
    assert (following - e) % 3 == 1


@pytest.mark.parametrize("kind", [int, fx.Uint32, fx.Int32])
def test_a_fresh_channel_begins_at_one_and_nothing_has_arrived(kind: Any) -> None:
    assert plain(next_epoch(kind(0))) == 1
    assert not plain(arrived(kind(0), kind(1)))
    assert not plain(in_step(kind(0), kind(1)))


@pytest.mark.parametrize("kind", [int, fx.Uint32, fx.Int32])
@pytest.mark.parametrize("e", [1, 2, HALF - 1, HALF, HALF + 1, EPOCH_LAST - 1, EPOCH_LAST])
def test_the_three_words_a_peer_may_show(kind: Any, e: int) -> None:
    def judge(seen: int) -> tuple[bool, bool]:
        return bool(plain(arrived(kind(seen), kind(e)))), bool(plain(in_step(kind(seen), kind(e))))

    assert judge(after(e, -1)) == (False, False), "one behind: wait"
    assert judge(e) == (True, True)
    assert judge(after(e, 1)) == (True, True), "one ahead: the data of this call is still there"
    assert judge(after(e, 2)) == (True, False), "two ahead: a desync"


calls_apart = st.integers(-BEHIND, AHEAD) | st.integers(-50, 50) | st.sampled_from([-BEHIND, AHEAD])


@given(epochs, calls_apart, kinds)
@example(EPOCH_LAST, AHEAD, int)
@example(1, -BEHIND, int)
def test_arrival_is_right_however_far_apart_two_ranks_can_be(e: int, calls: int, kind: Any) -> None:
    assert plain(arrived(kind(after(e, calls)), kind(e))) == (calls >= 0)


@given(epochs, calls_apart, kinds)
def test_in_step_counts_calls_and_not_words(e: int, calls: int, kind: Any) -> None:
    assert plain(in_step(kind(after(e, calls)), kind(e))) == (calls in (0, 1))


def test_the_bounds_are_sharp() -> None:
    assert not arrived(after(EPOCH_LAST, AHEAD + 1), EPOCH_LAST)
    assert arrived(after(1, -BEHIND - 1), 1)


@given(st.integers(HALF + 1, EPOCH_LAST))
def test_zero_looks_arrived_in_the_second_half_of_the_cycle(e: int) -> None:
    """So a channel that starts there sets its pads to the epoch before, not to zero."""
    assert arrived(0, e)
    assert not in_step(0, e)
    assert not arrived(previous_epoch(e), e)
