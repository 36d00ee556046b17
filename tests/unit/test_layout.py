# SPDX-License-Identifier: Apache-2.0
"""The layout of pads, staging and channels: nothing overlaps, nothing leaves its segment."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flycomm import channel, dispatch
from flycomm.errors import UsageError
from flycomm.geometry import LARGEST_CLASS, SMALLEST_CLASS, geometry, size_class
from flycomm.layout import plan_layout

worlds = st.integers(1, channel.MAX_WORLD)
classes = st.sampled_from([SMALLEST_CLASS << i for i in range(11)])


@given(blocks=st.integers(1, 40), world=worlds, capacity=classes)
def test_a_segment_holds_everything_once(blocks, world, capacity):
    spans = [(0, 8)]
    for block, source in itertools.product(range(blocks), range(world)):
        spans.append((channel.signal_offset(block, source), channel.SIGNAL_BYTES))
    for parity, source in itertools.product((0, 1), range(world)):
        offset = channel.staging_offset(blocks, world, capacity, parity, source)
        assert offset % channel.FRAGMENT_BYTES == 0
        spans.append((offset, capacity))
    spans.sort()
    for (start, length), (following, _) in itertools.pairwise(spans):
        assert start + length <= following
    assert spans[-1][0] + spans[-1][1] <= channel.segment_bytes(blocks, world, capacity)


def test_state_words_of_blocks_and_of_signals_do_not_meet():
    assert [channel.state_offset(block) for block in range(3)] == [0, 16, 32]
    words = {
        offset(number, peer)
        for offset in (channel.sent_offset, channel.received_offset)
        for number, peer in itertools.product(range(channel.USER_CHANNELS), range(channel.MAX_WORLD))
    }
    assert len(words) == 2 * channel.USER_CHANNELS * channel.MAX_WORLD
    assert min(words) >= channel.STATE_BYTES
    assert max(words) + 4 <= channel.sent_offset(channel.USER_CHANNELS, 0)


@given(
    target=st.sampled_from(["host", "cuda", "rocm"]),
    world=worlds,
    max_bytes=st.integers(8 << 20, 1 << 30),
    channels=st.integers(1, 3),
    graphs=st.booleans(),
)
def test_channels_fit_and_do_not_overlap(target, world, max_bytes, channels, graphs):
    layout = plan_layout(target, world, max_bytes, channels, graphs, {"mine": (7, 100_000)})
    assert layout.num_bytes <= max_bytes
    end, state = layout.user_offset + layout.user_bytes, 0
    for slot in layout.slots:
        assert slot.offset >= end
        assert slot.state_offset >= state
        end, state = slot.offset + slot.num_bytes, slot.state_offset + slot.blocks * channel.STATE_BYTES
        assert slot.num_bytes >= channel.segment_bytes(slot.signal_rows, world, slot.key.class_bytes)
    assert end <= layout.num_bytes
    assert state <= layout.state_bytes
    assert len({slot.key for slot in layout.slots}) == len(layout.slots)
    lanes = channels * (2 if graphs else 1)
    assert sum(slot.key.protocol == "barrier" for slot in layout.slots) == lanes


def test_too_little_memory_says_how_much_is_needed():
    with pytest.raises(UsageError, match=r"max_bytes=4096 is too small for 1 channel\(s\) of 8 ranks.* at least that"):
        plan_layout("host", 8, 4096, 1, False)


@given(num_bytes=st.integers(0, LARGEST_CLASS))
def test_a_size_class_is_the_smallest_power_of_two_that_holds_the_message(num_bytes):
    found = size_class(num_bytes)
    assert found >= num_bytes
    assert found & (found - 1) == 0
    assert found == SMALLEST_CLASS or found // 2 < num_bytes
    assert geometry("cuda", found).threads >= channel.MAX_WORLD


@given(num_bytes=st.integers(1, 1 << 28), largest=classes, world=worlds)
def test_select_is_pure_and_covers_the_message(num_bytes, largest, world):
    arguments = ("all_reduce", "sum", "host", world, num_bytes, "bfloat16", 1 << 26, largest)
    plan = dispatch.select(*arguments)
    assert plan == dispatch.select(*arguments)
    if num_bytes > 1 << 26:
        assert plan.protocol == "fallback"
        assert "max_bytes=67108864" in plan.reason
    else:
        assert plan.class_bytes <= largest
        assert plan.class_bytes * plan.pieces >= num_bytes > plan.class_bytes * (plan.pieces - 1)


def test_tables_differ_by_target():
    assert dispatch.table_hash("host") != dispatch.table_hash("cuda")
    assert dispatch.table_hash("host") == dispatch.table_hash("host")
