# SPDX-License-Identifier: Apache-2.0
"""Two-shot, with flags and with packets: one buffer a phase is enough, empty slices included."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .two_shot import Shape, Variant, system
from .verdict import assert_finds, assert_right, name

# units of a call over 2 ranks: 1 is the slices 1, 0; over 3 ranks 3 is 1, 1, 1; 4 is 2, 2, 0; 1 is 1, 0, 0
SHAPES = [
    Shape(),
    Shape(waves=2, units=(4, 1, 3)),
    Shape(world=3, units=(1, 3, 1, 3)),
    Shape(world=3, units=(3, 1, 2, 2)),
    Shape(world=3, waves=2, units=(4, 1)),
    pytest.param(Shape(world=3, waves=2, units=(4, 1, 6, 4)), marks=pytest.mark.full),
    pytest.param(Shape(world=4, units=(4, 1, 3)), marks=pytest.mark.full),
]


@pytest.mark.parametrize("packets", [False, True], ids=["flags", "packets"])
@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_the_protocol_holds(shape: Shape, packets: bool) -> None:
    assert_right(system(replace(shape, packets=packets), Variant()))


@pytest.mark.parametrize("first", [8, 10])
def test_it_holds_across_the_wrap(first: int) -> None:
    assert_right(system(Shape(world=3, units=(3, 1, 3), first_epoch=first), Variant()))
    assert_right(system(Shape(world=3, units=(3, 1, 3), first_epoch=first, packets=True), Variant()))


@pytest.mark.parametrize("world", [2, 3])
def test_two_words_are_as_good_as_two_epochs(world: int) -> None:
    assert_right(system(Shape(world=world, units=(3, 1, 3)), Variant(two_words=True)))


@pytest.mark.parametrize("world", [2, 3])
def test_one_buffer_for_both_phases_is_overwritten(world: int) -> None:
    shape = Shape(world=world, units=(world, world))
    assert_finds(system(shape, Variant(one_buffer=True)), "call 1 takes the data of calls")
    assert_finds(system(replace(shape, packets=True), Variant(one_buffer=True)), "stuck")


@pytest.mark.parametrize("world", [2, 3])
def test_one_epoch_for_both_phases_lets_the_first_signal_pass_for_the_second(world: int) -> None:
    assert_finds(system(Shape(world=world, units=(world,)), Variant(one_epoch=True)), "call 1 takes the data of calls")


@pytest.mark.parametrize("world", [2, 3])
def test_an_owner_of_nothing_that_leaves_overwrites_what_the_owners_read(world: int) -> None:
    leaves = Variant(empty_owner="leaves")
    assert_finds(system(Shape(world=world, units=(1, 1)), leaves), "call 1 takes the data of calls")
    assert_finds(system(Shape(world=world, units=(1, 1), packets=True), leaves), "stuck")


def test_an_owner_of_nothing_that_does_not_signal_is_waited_for() -> None:
    assert_finds(system(Shape(units=(1,)), Variant(empty_owner="is mute")), "stuck")
