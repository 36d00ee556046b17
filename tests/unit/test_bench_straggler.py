# SPDX-License-Identifier: Apache-2.0
"""Who is late, when and by how much, with a kernel that only keeps books: no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flycomm.bench import straggler

HERTZ = 2_000_000


@pytest.fixture
def log(monkeypatch) -> list[Any]:
    """Ticks of spins, and the indices of calls, as they come."""
    made: list[Any] = []
    monkeypatch.setattr(
        straggler.kernels, "compiled", lambda specialization: lambda ticks, *_: made.append(("spin", ticks))
    )
    return made


def _context(rank: int, size: int) -> Any:
    target = SimpleNamespace(
        capabilities=lambda device: SimpleNamespace(clock_hz=HERTZ),
        runtime=SimpleNamespace(current_stream=lambda device: 0),
        raise_pending=lambda: None,
    )
    world = SimpleNamespace(rank=rank, size=size, device=0)
    return SimpleNamespace(world=world, target=target, device=torch.device("cpu"))


@pytest.mark.parametrize(("rank", "late_at"), [(0, [0, 3, 6]), (1, [1, 4]), (2, [2, 5])])
def test_each_rank_in_turn_is_late_before_its_call(log, rank, late_at):
    call = straggler.delaying(_context(rank, 3), 50.0, lambda index: log.append(index) or index)
    assert [call(number % 2) for number in range(7)] == [0, 1, 0, 1, 0, 1, 0]
    expected: list[Any] = []
    for number in range(7):
        expected += [("spin", 100)] * (number in late_at) + [number % 2]
    assert log == expected


def test_every_contender_begins_with_the_first_rank(log):
    for _ in range(2):
        straggler.delaying(_context(0, 2), 50.0, lambda index: None)(3)
    assert log == [("spin", 100)] * 2


def test_without_a_delay_the_call_is_left_as_it_is(log):
    def call(index: int) -> None: ...

    assert straggler.delaying(_context(0, 2), 0.0, call) is call
    assert log == []
