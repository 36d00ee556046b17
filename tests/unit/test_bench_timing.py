# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of timing, on a stream, events and a graph that only keep books: no GPU."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from flycomm.bench import timing


class Machine:
    """A stream, and a rank's context around it, where a call takes 3 µs."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self.log: list[str] = []
        self.captured: list[int] | None = None

    def call(self, index: int) -> torch.Tensor:
        if self.captured is not None:
            self.captured.append(index)
        else:
            self.log.append(f"call {index}")
            self.now_us += 3.0
        return torch.full((1,), index)

    def align(self) -> None:
        self.log.append("align")

    def synchronize(self) -> None:
        self.log.append("synchronize")


@pytest.fixture
def machine(monkeypatch) -> Machine:
    made = Machine()

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self, stream: Any) -> None:
            assert stream is made
            self.us = made.now_us

        def synchronize(self) -> None:
            made.synchronize()

        def elapsed_time(self, end: Event) -> float:
            return (end.us - self.us) / 1000  # torch gives milliseconds

    class CUDAGraph:
        def replay(self) -> None:
            made.log.append("replay")
            made.now_us += 3.0 * len(self.calls)

    @contextmanager
    def graph(made_graph: CUDAGraph, *, stream: Any, capture_error_mode: str):
        assert stream is made
        assert capture_error_mode == "thread_local"
        made.captured = made_graph.calls = []
        yield
        made.captured = None

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    made.stream = made  # type: ignore[attr-defined]
    made.replay_stream = None  # type: ignore[attr-defined]
    return made


def test_a_graph_takes_buffers_in_turn_and_keeps_their_last_results(machine: Any):
    graph = timing.Graph(machine, machine.call, 4, 10)
    assert graph._graph.calls == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert {index: int(result) for index, result in graph.results.items()} == {0: 0, 1: 1, 2: 2, 3: 3}
    assert machine.log == ["synchronize"], "nothing may be in flight when a capture begins, and nothing runs in it"


def test_replays_are_queued_behind_one_another_after_the_ranks_have_aligned(machine: Any):
    graph = timing.Graph(machine, machine.call, 4, 10)
    machine.log.clear()
    assert graph.time(5) == pytest.approx([3.0] * 5)
    warm = machine.log.index("align")
    assert machine.log[:warm] == ["replay"] * 3 + ["synchronize"]
    assert machine.log[warm:] == ["align", *["replay"] * 5, "synchronize"]


def test_events_around_calls(machine: Any):
    assert timing.eager(machine, machine.call, 2, 4, 3) == pytest.approx([3.0] * 3)
    assert machine.log == ["align", "call 0", "call 1", "call 0", "call 1", "synchronize"] * 3


def test_the_wall_clock_where_there_is_no_stream(machine: Any):
    machine.stream = None
    samples = timing.eager(machine, machine.call, 2, 4, 3)
    assert len(samples) == 3
    assert all(0 < sample < 1e6 for sample in samples)
    assert machine.log == ["align", "call 0", "call 1", "call 0", "call 1"] * 3


def test_a_call_is_over_when_it_returns_and_nothing_waits_between_calls(machine: Any):
    samples = timing.enqueue(machine, machine.call, 2, 4, 3)
    assert len(samples) == 12
    assert all(0 < sample < 1e6 for sample in samples)
    assert machine.log == ["align", "call 0", "call 1", "call 0", "call 1", "synchronize"] * 3
