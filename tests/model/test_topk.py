# SPDX-License-Identifier: Apache-2.0
"""The top-k exchange: right in every interleaving, and each rule left out is found. Tags come round after 3 calls."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flycomm.epoch import EPOCH_LAST
from flycomm.primitives.candidates import TAGS

from .topk import EVERYBODY, Shape, Variant, system
from .verdict import assert_finds, assert_right, name

PLAIN = Variant()
NEVER = Variant(reset="never")  # what "all" does: its slots are all filled in every call that has the row

ONE = Shape(rows=(1,) * 8)
RESTS = Shape(rows=(2, 1, 1, 1, 1, 1, 2))  # row 1 rests until its buffer and its tag come again: 6 calls
OWNED = Shape(rows=(1,) * 5, owners=(0,))
PASSED = Shape(rows=(1,) * 7, owners=(0, 1, 1, 1, 1, 1, 0))  # rank 0 does, while the row goes on


@pytest.mark.parametrize(
    "shape",
    [
        ONE,
        RESTS,
        replace(RESTS, rows=(2, 1, 2, 1, 1, 2)),
        Shape(rows=(3, 1, 2, 3)),
        Shape(rows=(1,) * 8, words=(2, 1, 1)),
        Shape(world=3, rows=(1, 1, 1)),
        pytest.param(Shape(world=3, rows=(2, 1, 1)), marks=[pytest.mark.full, pytest.mark.timeout(600)]),
    ],
    ids=name,
)
def test_everybody_merges_and_nobody_resets(shape: Shape) -> None:
    assert_right(system(shape, NEVER))
    assert_right(system(shape, replace(NEVER, tags=5)))


def test_across_the_wrap_two_calls_of_one_buffer_have_different_tags() -> None:
    """Epochs end at 12 here, at 2**32 - 4 in reality: modulo the number of tags that must not be 2, and is 252."""
    wraps = Shape(rows=(1,) * 8, first_epoch=9)
    assert_right(system(wraps, replace(NEVER, tags=3)))
    assert_right(system(wraps, replace(NEVER, tags=7)))
    assert_finds(system(wraps, replace(NEVER, tags=5)), "call 4 takes the keys of calls (2,)")
    assert_right(system(wraps, replace(PLAIN, tags=5)))
    assert EPOCH_LAST % TAGS == 252


def test_a_buffer_chosen_by_the_tag_is_used_twice_in_a_row() -> None:
    """The number of tags is odd: the last and the first have one parity."""
    assert_finds(system(ONE, replace(NEVER, buffer="tag")), "stuck")


@pytest.mark.parametrize(
    "shape",
    [
        OWNED,
        PASSED,
        Shape(rows=(2, 1, 2), owners=(0, 1)),
        Shape(rows=(1,) * 6, owners=(0, EVERYBODY, 1)),
        Shape(rows=(1,) * 4, owners=(0, 1), words=(2, 1)),
        Shape(world=3, rows=(1, 1, 1), owners=(0,)),
        Shape(world=3, rows=(1, 1, 1), owners=(0, 1, 0)),
        Shape(rows=(1,) * 6, owners=(0, 1, 1), first_epoch=9),
        pytest.param(Shape(world=3, rows=(1,) * 4, owners=(0, 1, 2)), marks=pytest.mark.full),
    ],
    ids=name,
)
def test_a_row_has_an_owner_who_resets_and_the_others_wait_for_tokens(shape: Shape) -> None:
    assert_right(system(shape, PLAIN))


@pytest.mark.parametrize(
    "shape",
    [
        Shape(rows=(1,) * 4, owners=(0,), back=(True,)),
        Shape(rows=(2, 1, 2), owners=(0, 1), back=(True,)),
        Shape(rows=(1,) * 6, owners=(0, 1, 1), words=(2, 1), first_epoch=9, back=(True,)),
        Shape(world=3, rows=(1, 1), owners=(0, 1), back=(True,)),
        Shape(rows=(1, 1, 1), owners=(0,), limit=frozenset({(0, 2)}), back=(True,)),
        Shape(rows=(1, 1, 1), owners=(0,), limit=frozenset({(1, 2)}), back=(True,)),
        pytest.param(Shape(world=3, rows=(1, 1, 1), owners=(0,), back=(True,)), marks=pytest.mark.full),
    ],
    ids=name,
)
def test_an_owner_pushes_its_result_to_where_it_would_push_its_keys(shape: Shape) -> None:
    assert_right(system(shape, PLAIN))


def test_calls_that_push_it_and_calls_that_do_not_share_a_channel() -> None:
    """Because who takes a word zeroes it: while the owner keeps its result, the others' words of it rest."""
    shape = Shape(rows=(1,) * 7, owners=(0,), back=(True, *[False] * 5))
    assert_right(system(shape, PLAIN))
    assert_finds(system(shape, NEVER), "call 7 takes the keys of calls (1,)")


@pytest.mark.parametrize("world", [2, 3])
def test_an_owner_less_rank_without_a_token_overwrites(world: int) -> None:
    shape = replace(OWNED, world=world, rows=(1, 1, 1))
    assert_finds(system(shape, replace(PLAIN, token=False)), "stuck")
    for buffers in (3, 4):
        more = replace(shape, rows=(1,) * (buffers + 1))
        assert_finds(system(more, replace(PLAIN, token=False, buffers=buffers)), "stuck")


def test_a_tag_alone_does_not_tell_a_slot_that_rested() -> None:
    assert_finds(system(RESTS, replace(NEVER, counts="calls")), "call 7 takes the keys of calls (1,)")
    assert_right(system(replace(RESTS, rows=RESTS.rows[1:]), replace(NEVER, counts="calls")))


def test_nor_one_that_a_smaller_k_passed_over() -> None:
    passed = Shape(rows=(1,) * 7, words=(2, 1, 1, 1, 1, 1))
    assert_right(system(passed, NEVER))
    assert_finds(system(passed, replace(NEVER, fills="k")), "call 7 takes the keys of calls (7, 1)")


def test_nor_one_whose_row_another_rank_owned() -> None:
    assert_finds(system(PASSED, NEVER), "call 7 takes the keys of calls (1,)")


def test_a_reader_that_resets_needs_neither_a_count_of_rows_nor_whole_slots() -> None:
    assert_right(system(RESTS, replace(PLAIN, counts="calls")))
    assert_right(system(Shape(rows=(1,) * 7, words=(2, 1, 1, 1, 1, 1)), replace(PLAIN, fills="k")))


@pytest.mark.parametrize("shape", [ONE, OWNED], ids=["all", "owner"])
def test_a_reset_in_the_next_call_wipes_what_a_peer_has_written(shape: Shape) -> None:
    """It may then be a call ahead, at the buffer that is reset; a third buffer would be needed."""
    late = replace(PLAIN, reset="next")
    assert_finds(system(shape, late), "stuck")
    assert_right(system(replace(shape, rows=(1,) * 5), replace(late, buffers=3)))


def test_one_buffer_is_overwritten() -> None:
    assert_finds(system(ONE, replace(NEVER, buffers=1)), "stuck")


def test_without_a_tag_what_nobody_resets_is_taken_again() -> None:
    assert_finds(system(ONE, replace(NEVER, compare="any")), "call 3 takes the keys of calls (1,)")
    assert_right(system(ONE, replace(PLAIN, compare="any")))


@pytest.mark.parametrize(
    "shape",
    [
        Shape(rows=(1, 1, 1), limit=frozenset({(0, 2)})),
        Shape(rows=(2, 1), limit=frozenset({(0, 1)})),
        Shape(rows=(2, 1, 2), limit=frozenset({(0, 2)})),
        Shape(rows=(1, 1, 1), owners=(0,), limit=frozenset({(0, 2)})),
        Shape(rows=(1, 1, 1), owners=(0,), limit=frozenset({(1, 2)})),
        Shape(rows=(1, 1, 1), owners=(0, 1), limit=frozenset({(0, 2), (1, 2)})),
        pytest.param(Shape(rows=(1, 2, 1), owners=(0,), limit=frozenset({(0, 2)})), marks=pytest.mark.full),
        pytest.param(Shape(world=3, rows=(1, 1), limit=frozenset({(0, 1)})), marks=pytest.mark.full),
    ],
    ids=name,
)
def test_whoever_gives_up_every_success_is_right_and_all_end(shape: Shape) -> None:
    assert_right(system(shape, NEVER if shape.owners == (EVERYBODY,) else PLAIN))


LARGER = Variant(counts="calls", marks=True)  # of a larger kernel, whose grid is there in every call
OFTEN = Shape(rows=(2, 1, 2))


@pytest.mark.parametrize(
    "shape",
    [
        RESTS,
        replace(RESTS, owners=(0, 1)),
        Shape(rows=(2, 1, 2, 1, 1, 2), owners=(0, EVERYBODY, 1), first_epoch=9),
        *[
            pytest.param(replace(OFTEN, owners=owners, limit=frozenset({one})), marks=pytest.mark.full)
            for owners in ((0,), (EVERYBODY,), (0, 1))
            for one in ((0, 1), (1, 1), (0, 2), (1, 2))
            if (owners, one) != ((0,), (1, 2))
        ],
        replace(OFTEN, owners=(0,), limit=frozenset({(1, 2)})),
    ],
    ids=name,
)
def test_in_a_larger_kernel_rows_rest_while_their_blocks_count(shape: Shape) -> None:
    """One block of a rank meets its peers in every call, and that is enough for the others."""
    assert_right(system(shape, LARGER))


def test_there_the_reader_resets_in_every_mode_and_owners_send_tokens() -> None:
    assert_finds(system(RESTS, replace(LARGER, reset="never")), "call 7 takes the keys of calls (1,)")
    assert_finds(system(replace(OFTEN, owners=(0,)), replace(LARGER, token=False)), "stuck")


def test_there_a_block_that_sends_before_the_marks_runs_ahead_of_a_failure() -> None:
    shape = replace(OFTEN, owners=(0,), limit=frozenset({(0, 1)}))
    assert_finds(system(shape, replace(LARGER, marks=False)), "desync: call 1 sees tokens (3,)")
