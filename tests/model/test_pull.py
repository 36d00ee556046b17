# SPDX-License-Identifier: Apache-2.0
"""Reading peers' memory where it lies: the barriers it needs, and what a rank that gives up may still do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .pull import Shape, Variant, system
from .verdict import assert_finds, assert_right, name

PROTOCOL = Variant()
IN_PLACE = Shape(in_place=True)
WRONG = "succeeds with the inputs of calls"


@pytest.mark.parametrize(
    "shape",
    [
        Shape(calls=4),
        Shape(blocks=2),
        Shape(world=3),
        Shape(calls=3, first_epoch=10),
        Shape(early_loads=True),
        replace(IN_PLACE, pieces=3),
        replace(IN_PLACE, blocks=2, pieces=2, calls=1),
        replace(IN_PLACE, world=3, pieces=2),
        pytest.param(replace(IN_PLACE, blocks=2, pieces=2), marks=pytest.mark.full),
        replace(IN_PLACE, pieces=2, calls=3, first_epoch=9),
        replace(IN_PLACE, pieces=2, early_loads=True),
    ],
    ids=name,
)
def test_the_protocol_holds(shape: Shape) -> None:
    """Whichever block of the kernel before wrote a slot, and though the kernel after writes all at once."""
    assert_right(system(shape, PROTOCOL))


@pytest.mark.parametrize("shape", [Shape(), Shape(world=3), IN_PLACE, replace(IN_PLACE, pieces=2)], ids=name)
@pytest.mark.parametrize("missing", ["entry", "trailing"])
def test_both_barriers_are_needed(shape: Shape, missing: str) -> None:
    found = "call 1" if missing == "trailing" else "call 2" if shape.in_place else "call 1"
    assert_finds(system(shape, replace(PROTOCOL, **{missing: False})), f"{found} {WRONG}")


@pytest.mark.parametrize("world", [2, 3])
def test_in_place_the_write_comes_after_the_barrier(world: int) -> None:
    shape = replace(IN_PLACE, world=world, calls=1)
    assert_finds(system(shape, Variant(write="before")), f"call 1 {WRONG} (-1")


def test_in_place_a_block_reads_what_its_own_pair_writes() -> None:
    """Elsewhere any block may read anything: the kernel before has ended, and the one after has not begun."""
    assert_right(system(Shape(blocks=2), Variant(paired=False)))
    assert_finds(system(replace(IN_PLACE, blocks=2, calls=1), Variant(paired=False)), f"call 1 {WRONG} (-1")


def test_without_acquire_an_input_that_was_loaded_before_is_stale() -> None:
    assert_finds(system(Shape(early_loads=True), Variant(acquire=False)), WRONG)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(limit=frozenset({(0, 1)})),
        Shape(limit=frozenset({(0, 1), (1, 1), (0, 2), (1, 2)})),
        pytest.param(Shape(blocks=2, calls=1, limit=frozenset({(0, 1)})), marks=pytest.mark.full),
        Shape(world=3, calls=1, limit=frozenset({(0, 1)})),
        replace(IN_PLACE, pieces=2, limit=frozenset({(0, 1), (1, 1)})),
        pytest.param(replace(IN_PLACE, blocks=2, calls=1, limit=frozenset({(0, 1)})), marks=pytest.mark.full),
        replace(IN_PLACE, world=3, calls=1, limit=frozenset({(0, 1)})),
    ],
    ids=name,
)
def test_whoever_gives_up_every_success_is_right_and_all_end(shape: Shape) -> None:
    """The kernel after the one that gave up writes the input all the same."""
    assert_right(system(shape, PROTOCOL))


@pytest.mark.parametrize("shape", [Shape(), Shape(world=3, calls=1), IN_PLACE], ids=name)
def test_who_does_not_look_reads_what_a_peer_that_gave_up_writes_next(shape: Shape) -> None:
    """The peer signalled before it gave up, so the late rank's wait succeeds at its first poll."""
    case = replace(shape, limit=frozenset({(0, 1)}))
    assert_finds(system(case, Variant(look=False)), f"call 1 {WRONG}")


def test_in_place_nothing_is_written_after_a_failed_barrier() -> None:
    case = replace(IN_PLACE, calls=1, limit=frozenset({(0, 1)}))
    assert_finds(system(case, Variant(write="anyway")), f"call 1 {WRONG} (-1")
