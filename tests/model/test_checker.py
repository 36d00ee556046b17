# SPDX-License-Identifier: Apache-2.0
"""The checker itself, on the litmus tests that every memory model is described with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from .checker import TooLarge, check
from .steps import Await, Barrier, Drain, Fault, Fence, Load, Program, Step, Store, Swap, System, Write, fixed
from .verdict import assert_finds, assert_right


class Registers(NamedTuple):
    seen: tuple[int, ...] = ()


def store(word: str, value: int, release: bool = False) -> Store:
    return Store(fixed(word), fixed(value), release)


def load(*words: str) -> Load:
    return Load(fixed(words), lambda r, values: Registers(r.seen + values))


def reaches(word: str, value: int = 1) -> Await:
    return Await(fixed([word]), lambda r, values: values[0] >= value)


def never(*values: int) -> Step:
    def judge(r: Registers, _: tuple[Any, ...]) -> Registers:
        if r.seen == values:
            raise Fault(f"saw {values}")
        return r

    return Load(fixed([]), judge)


def system(*programs: Sequence[Step], words: str = "xy", **machine: Any) -> System:
    """One block of one wave for each program."""
    waves: dict[Any, tuple[Program, Any]] = {(i, 0): (tuple(steps), Registers()) for i, steps in enumerate(programs)}
    return System(waves=waves, memory=dict.fromkeys(words, 0), **machine)


def block(*programs: Sequence[Step], reader: Sequence[Step], cumulative: bool) -> System:
    """One block with a wave for each program, and a reader."""
    waves: dict[Any, tuple[Program, Any]] = {(0, w): (tuple(steps), Registers()) for w, steps in enumerate(programs)}
    waves[1, 0] = (tuple(reader), Registers())
    return System(waves=waves, memory=dict.fromkeys("xy", 0), cumulative=cumulative)


READ_AFTER_FLAG: list[Step] = [reaches("y"), load("x"), never(0)]


def test_a_relaxed_flag_overtakes_its_data() -> None:
    assert_finds(system([store("x", 1), store("y", 1)], READ_AFTER_FLAG), "saw (0,)")


def test_a_released_flag_does_not() -> None:
    assert_right(system([store("x", 1), store("y", 1, release=True)], READ_AFTER_FLAG))


def test_neither_does_a_flag_after_a_drain() -> None:
    assert_right(system([store("x", 1), Drain(), store("y", 1)], READ_AFTER_FLAG))


def test_a_release_orders_nothing_that_follows_it() -> None:
    assert_finds(system([store("x", 1, release=True), store("y", 1)], READ_AFTER_FLAG), "saw (0,)")


def test_both_sides_of_a_store_buffer_may_read_old_values() -> None:
    ends: set[Any] = set()

    def program(mine: str, other: str, result: str) -> list[Step]:
        keep = Write(fixed(result), lambda r: r.seen[0])
        return [store(mine, 1), load(other), keep]

    def note(memory: dict[Any, Any]) -> None:
        ends.add((memory["a"], memory["b"]))

    assert_right(system(program("x", "y", "a"), program("y", "x", "b"), words="xyab", final=note))
    assert ends == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_stores_of_a_wave_to_one_word_keep_their_order() -> None:
    assert_right(system([store("x", 1), store("x", 2)], [load("x"), load("x"), never(2, 1)]))
    assert_finds(system([store("x", 1), store("x", 2)], [load("x"), load("x"), never(1, 2)]), "saw (1, 2)")


@pytest.mark.parametrize("cumulative", [False, True])
def test_a_barrier_carries_another_waves_stores_only_where_release_is_cumulative(cumulative: bool) -> None:
    meet = Barrier((0,))
    case = block(
        [store("x", 1), meet], [meet, store("y", 1, release=True)], reader=READ_AFTER_FLAG, cumulative=cumulative
    )
    if cumulative:
        assert_right(case)
    else:
        assert_finds(case, "saw (0,)")


@pytest.mark.parametrize("cumulative", [False, True])
def test_release_covers_no_store_that_no_barrier_orders_before_it(cumulative: bool) -> None:
    case = block([store("x", 1)], [store("y", 1, release=True)], reader=READ_AFTER_FLAG, cumulative=cumulative)
    assert_finds(case, "saw (0,)")


def test_a_wave_that_drains_before_the_barrier_is_seen() -> None:
    meet = Barrier((0,))
    assert_right(block([store("x", 1), Drain(), meet], [meet, store("y", 1)], reader=READ_AFTER_FLAG, cumulative=False))


def test_an_early_load_is_stale_until_a_fence() -> None:
    sender = [store("x", 1), store("y", 1, release=True)]
    early = {(1,): ("x",)}
    assert_finds(system(sender, READ_AFTER_FLAG, early=early), "saw (0,)")
    assert_right(system(sender, [reaches("y"), Fence(), load("x"), never(0)], early=early))


def test_a_circle_of_waits_is_stuck() -> None:
    assert_finds(system([reaches("x"), store("y", 1)], [reaches("y"), store("x", 1)]), "stuck")


def test_a_wait_for_what_was_overwritten_is_stuck_in_some_order_only() -> None:
    exactly = Await(fixed(["x"]), lambda r, values: values[0] == 1)
    outcome = check(system([store("x", 1), store("x", 2)], [exactly]))
    assert any("stuck" in fault for fault in outcome.faults)
    assert all(outcome.faults.values()), "a fault says what led to it"


def test_a_barrier_that_one_wave_leaves_out_is_stuck() -> None:
    assert_finds(block([Barrier((0,))], [], reader=[], cumulative=False), "stuck")


def test_one_of_two_swaps_succeeds() -> None:
    def swap(result: str) -> list[Step]:
        take = Swap(fixed("x"), fixed(0), fixed(1), lambda r, swapped: Registers((int(swapped),)))
        return [take, Write(fixed(result), lambda r: r.seen[0])]

    def judge(memory: dict[Any, Any]) -> None:
        if memory["a"] + memory["b"] != 1:
            raise Fault(f"{memory}")

    assert_right(system(swap("a"), swap("b"), words="xab", final=judge))


def test_every_order_of_independent_steps_is_a_path_through_few_states() -> None:
    """Three waves of two loads: 3**3 states, not the 90 orders."""
    assert check(system(*([[load("x"), load("y")]] * 3))).states == 27


def test_a_case_over_its_limit_proves_nothing_and_says_so() -> None:
    with pytest.raises(TooLarge, match="more than 10 states"):
        check(system(*([[load("x"), load("y")]] * 3)), limit=10)
