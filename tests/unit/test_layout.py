# SPDX-License-Identifier: Apache-2.0
"""The layout of pads, staging and channels: nothing overlaps, nothing leaves its segment."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flycomm import channel, dispatch
from flycomm.dtypes import REDUCTIONS
from flycomm.errors import UsageError
from flycomm.geometry import SMALLEST_CLASS, size_class
from flycomm.layout import key_of, plan_layout
from flycomm.tables import LOOPING, OPS, PROTOCOLS, Row, Table, carries, shipped

ARCHES = ("host", "sm_90", "gfx942", "gfx950")
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
    arch=st.sampled_from(ARCHES),
    world=worlds,
    max_bytes=st.integers(24 << 20, 1 << 30),
    channels=st.integers(1, 3),
    graphs=st.booleans(),
    protocol=st.sampled_from(("auto", *PROTOCOLS)),
)
def test_channels_fit_and_do_not_overlap(arch, world, max_bytes, channels, graphs, protocol):
    layout = plan_layout(shipped(arch), world, max_bytes, channels, graphs, {"mine": (7, 100_000)}, protocol)
    assert layout.num_bytes <= max_bytes
    end, state = layout.user_offset + layout.user_bytes, 0
    for slot in layout.slots:
        assert slot.offset >= end
        assert slot.state_offset >= state
        end, state = slot.offset + slot.num_bytes, slot.state_offset + slot.blocks * channel.STATE_BYTES
        buffers = channel.BUFFERS.get(slot.key.wire, 2)
        assert slot.num_bytes >= channel.segment_bytes(slot.signal_rows, world, slot.capacity, buffers)
        assert slot.capacity == slot.key.capacity * (2 if slot.key.wire == "packets" else 1)
    assert end <= layout.num_bytes
    assert state <= layout.state_bytes
    assert len({slot.key for slot in layout.slots}) == len(layout.slots)
    lanes = channels * (2 if graphs else 1)
    assert sum(slot.key.wire == "barrier" for slot in layout.slots) == lanes


def test_too_little_memory_says_how_much_is_needed():
    with pytest.raises(UsageError, match=r"max_bytes=4096 is too small for 1 channel\(s\) of 8 ranks.* at least that"):
        plan_layout(shipped("host"), 8, 4096, 1, False)


@given(num_bytes=st.integers(0, 1 << 30))
def test_a_size_class_is_the_smallest_power_of_two_that_holds_the_message(num_bytes):
    found = size_class(num_bytes)
    assert found >= num_bytes
    assert found & (found - 1) == 0
    assert found == SMALLEST_CLASS or found // 2 < num_bytes


@given(
    arch=st.sampled_from(ARCHES),
    world=worlds,
    protocol=st.sampled_from(("auto", *PROTOCOLS)),
    op=st.sampled_from(OPS),
    reduction=st.sampled_from(REDUCTIONS),
    num_bytes=st.integers(1, 1 << 28),
    max_bytes=st.sampled_from([24 << 20, 64 << 20, 1 << 29]),
    captured=st.booleans(),
)
def test_every_call_has_a_row_that_can_carry_it_and_a_channel(
    arch, world, protocol, op, reduction, num_bytes, max_bytes, captured
):
    layout = plan_layout(shipped(arch), world, max_bytes, 1, True, None, protocol)
    arguments = (op, reduction, captured, num_bytes, "bfloat16", 1 << 26, layout.routes)
    plan = dispatch.select(*arguments)
    assert plan == dispatch.select(*arguments)
    if num_bytes > 1 << 26:
        assert plan.protocol == "fallback"
        assert "max_bytes=67108864" in plan.reason
        return
    assert plan.row is not None
    assert carries(plan.protocol, op, reduction)
    assert plan.protocol in LOOPING or num_bytes <= plan.row.capacity
    assert plan.row.threads >= channel.MAX_WORLD
    assert key_of(plan.row, 0, captured) in {slot.key for slot in layout.slots}
    if protocol != "auto" and carries(protocol, op, reduction) and plan.row.largest is not None:
        assert plan.protocol == protocol


@pytest.mark.parametrize("protocol", ["packets", "sentinel"])
def test_a_protocol_asked_for_carries_no_more_than_a_row_has_room_for(protocol):
    """Of a row that flags go through in pieces."""
    rows = (Row("all_reduce", (1, 8), "any", 1 << 20, "flags", 1, 64, 8192), *shipped("host").rows)
    table = Table("host", "measured", "by hand", rows)
    for row in plan_layout(table, 2, 8 << 20, 1, False, None, protocol).routes["all_reduce", False]:
        assert row.protocol in LOOPING or row.largest <= row.capacity


def test_a_plan_says_what_cannot_be_done():
    routes = plan_layout(shipped("host"), 2, 8 << 20, 1, False).routes
    bad = dispatch.select("all_reduce", "product", False, 8, "float32", 64, routes)
    assert (bad.protocol, bad.row) == ("fallback", None)
    assert "'product' is not one of sum, avg, max, min" in bad.reason
    assert "float64 is not one of" in dispatch.select("all_reduce", "sum", False, 8, "float64", 64, routes).reason
    assert dispatch.select("all_gather", "", False, 8, "float64", 64, routes).row is not None
