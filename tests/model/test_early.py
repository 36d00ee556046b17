# SPDX-License-Identifier: Apache-2.0
"""Early launches change no order if every block waits first; and what goes wrong where one does not."""

from __future__ import annotations

import pytest

from .early import system
from .verdict import assert_finds, assert_right


@pytest.mark.parametrize(
    "launches",
    [
        ("turn", "turn", "turn", "turn"),
        ("plain", "turn", "turn", "plain", "turn"),
        ("turn", "plain", "plain", "turn"),
        ("turn", "turn", "eager", "plain"),
    ],
    ids=" ".join,
)
def test_kernels_that_wait_first_run_in_turn(launches: tuple[str, ...]) -> None:
    assert_right(system(*launches, places=True))


def test_an_access_before_the_wait_is_out_of_order() -> None:
    assert_finds(system("turn", "late"), "access 1 reads (0,)")
    assert_finds(system("plain", "turn", "late"), "access 2 reads")


def test_all_blocks_have_to_wait() -> None:
    assert_finds(system("turn", "half"), "access 1 reads (0,)")


def test_a_kernel_that_does_not_wait_breaks_the_chain() -> None:
    """It touches nothing itself, ends before the one ahead of it, and is taken for the end of both."""
    assert_finds(system("turn", "blind", "turn"), "access 1 reads (0,)")
    assert_finds(system("turn", "blind", "plain"), "access 1 reads (0,)")


def test_who_lets_the_next_start_before_it_has_waited_makes_three() -> None:
    assert_right(system("turn", "eager", "turn"))
    assert_finds(system("turn", "eager", "turn", places=True), "three at once")
