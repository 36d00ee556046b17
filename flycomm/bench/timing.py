# SPDX-License-Identifier: Apache-2.0
"""One rank's microseconds a call: by wall clock, by events, or by replays of a captured graph;
and how long it takes only to call.

Ranks align before each timed part, so that none waits for another inside it for longer than the exchange takes.
Everything runs on the context's one stream, which is current; replays may be asked for on another.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch

from flycomm.bench.contender import Context

_WARM_REPLAYS = 3
# Virtual ranks are threads of one process, and a capture is not a thing of one thread: what it does on its way in
# (device synchronisation, emptying the allocator's cache) would disturb another thread's.
_capturing = threading.Lock()

Call = Callable[[int], Any]


def eager(context: Context, call: Call, buffers: int, calls: int, repeats: int) -> list[float]:
    """``repeats`` samples of ``calls`` calls each, buffers in turn."""
    measure = _by_wall_clock if context.stream is None else _by_events
    return [measure(context, call, buffers, calls) for _ in range(repeats)]


def _by_wall_clock(context: Context, call: Call, buffers: int, calls: int) -> float:
    context.align()
    start = time.perf_counter_ns()
    for index in range(calls):
        call(index % buffers)
    return (time.perf_counter_ns() - start) / 1000 / calls


def _by_events(context: Context, call: Call, buffers: int, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    context.align()
    start.record(context.stream)
    for index in range(calls):
        call(index % buffers)
    end.record(context.stream)
    end.synchronize()
    return start.elapsed_time(end) * 1000 / calls


def enqueue(context: Context, call: Call, buffers: int, calls: int, repeats: int) -> list[float]:
    """CPU microseconds until a call returns, one number a call; nothing is waited for within ``calls`` of them.

    On a target without streams a call returns when its work is done.
    """
    samples = []
    for _ in range(repeats):
        context.align()
        for index in range(calls):
            start = time.perf_counter_ns()
            call(index % buffers)
            samples.append((time.perf_counter_ns() - start) / 1000)
        context.synchronize()
    return samples


class Graph:
    """``calls`` calls, buffers in turn, captured once. ``results[i]`` is the last captured result of buffer ``i``."""

    def __init__(self, context: Context, call: Call, buffers: int, calls: int):
        self._context = context
        self._calls = calls
        self._graph = torch.cuda.CUDAGraph()
        self.results: dict[int, Any] = {}
        context.synchronize()
        # "thread_local": threads that a library keeps (NCCL's watchdog), and other ranks, may go on using the driver
        with _capturing, torch.cuda.graph(self._graph, stream=context.stream, capture_error_mode="thread_local"):
            for index in range(calls):
                self.results[index % buffers] = call(index % buffers)

    def replay(self) -> None:
        self._graph.replay()

    def time(self, repeats: int) -> list[float]:
        """Microseconds a call in each of ``repeats`` replays, which are queued ahead, one behind the other."""
        stream = self._context.replay_stream or self._context.stream
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        with nullcontext() if stream is self._context.stream else torch.cuda.stream(stream):
            for _ in range(_WARM_REPLAYS):
                self.replay()
            stream.synchronize()
        self._context.align()
        with nullcontext() if stream is self._context.stream else torch.cuda.stream(stream):
            if stream is not self._context.stream:
                stream.wait_stream(self._context.stream)
            events[0].record(stream)
            for event in events[1:]:
                self.replay()
                event.record(stream)
            stream.synchronize()
        return [before.elapsed_time(after) * 1000 / self._calls for before, after in pairwise(events)]
