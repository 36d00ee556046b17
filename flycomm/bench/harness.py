# SPDX-License-Identifier: Apache-2.0
"""A case: the result of every contender is checked first, then its calls are timed, on all ranks together."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from flycomm.bench import straggler, timing
from flycomm.bench.baselines import SETUP_ERRORS, Variants
from flycomm.bench.contender import Contender, Context, Result
from flycomm.bench.problem import BUFFERS, Checked
from flycomm.bench.reference import Verdict, worst
from flycomm.bench.stats import slowest

T = TypeVar("T")
Guard = Callable[[Callable[[], Any]], Any]


class BaselineError(Exception):
    """A baseline cannot be measured here; raised on all ranks alike, with every rank's reason."""


@dataclass(frozen=True)
class Method:
    """How to time: ``mode`` "graph" or "eager", ``calls`` in a replay or a sample, ``repeats`` of that.

    ``straggler_us``: how late one rank comes to each call, another one each time; 0: none does.
    """

    mode: str
    calls: int
    repeats: int
    straggler_us: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Times are None where the result was wrong: that is not timed. ``enqueue_us`` is the CPU's share of an eager call,
    on the rank where it is longest; None in a graph, whose replay calls nothing."""

    us: float | None
    skew_us: float | None
    correct: bool
    max_error: float
    spread_us: float | None = None  # of the slowest rank's repeats: stats.Timing
    enqueue_us: float | None = None


def measure(context: Context, contender: Contender, problem: Checked, method: Method, exact: bool) -> Outcome:
    """Check and time one contender. Errors come through as they are: for flycomm itself."""
    return _measure(context, contender, problem, method, exact, lambda step: step())


def measure_best(context: Context, variants: Variants, problem: Checked, method: Method) -> Outcome:
    """The fastest correct one of a baseline's variants. Raises :class:`BaselineError` if all fail."""
    outcomes, reasons = [], []
    for make in variants:
        try:
            outcome = _measure(context, make(), problem, method, False, lambda step: _attempt(context, step))
        except BaselineError as error:
            reasons.append(str(error))
        else:
            outcomes.append(outcome)
            if not outcome.correct:
                reasons.append(f"the result is wrong by up to {outcome.max_error:g}")
    timed = [outcome for outcome in outcomes if outcome.us is not None]
    if not timed:
        raise BaselineError("; ".join(dict.fromkeys(reasons)))
    return min(timed, key=lambda outcome: outcome.us or 0.0)


def _attempt(context: Context, step: Callable[[], T]) -> T:
    """``step()`` on every rank; when one fails, all know."""
    result, reason = None, ""
    try:
        result = step()
    except SETUP_ERRORS as error:
        first_line = (str(error).strip() or "no message").splitlines()[0]
        reason = f"{type(error).__name__}: {first_line}"
    reasons = context.world.vote(not reason, reason)
    if reasons:
        raise BaselineError("; ".join(reasons))
    return result  # type: ignore[return-value]


def _measure(
    context: Context, contender: Contender, problem: Checked, method: Method, exact: bool, guard: Guard
) -> Outcome:
    guard(lambda: contender.prepare(context, problem.inputs))
    call = straggler.delaying(context, method.straggler_us, contender.call)
    results = guard(lambda: _call_each(context, call))
    verdict = _agree(context, problem.judge(results, exact))
    samples: list[float] = []
    enqueued: list[float] = []
    if verdict.correct and method.mode == "graph":
        graph = guard(lambda: timing.Graph(context, call, BUFFERS, method.calls))
        guard(lambda: contender.captured(context))
        if not contender.in_place:
            verdict = _check_replay(context, graph, problem, exact)
        if verdict.correct:
            samples = graph.time(method.repeats)
        del graph, results  # before the memory that they use goes
    elif verdict.correct:
        samples = timing.eager(context, call, BUFFERS, method.calls, method.repeats)
        enqueued = timing.enqueue(context, contender.enqueue, BUFFERS, method.calls, method.repeats)
    context.synchronize()
    context.comm.check()
    gathered = [json.loads(one) for one in context.world.exchange(json.dumps([samples, enqueued]).encode())]
    contender.release(context)
    if not samples:
        return Outcome(None, None, False, verdict.max_error)
    found = slowest([one for one, _ in gathered])
    enqueue_us = slowest([one for _, one in gathered]).us if enqueued else None
    return Outcome(found.us, found.skew_us, True, verdict.max_error, found.spread_us, enqueue_us)


def _call_each(context: Context, call: timing.Call) -> dict[int, Result]:
    """The first result of every buffer, copied, after calls that warm up. Inputs are as they were for each of them."""
    context.world.barrier()
    results = {index: _copied(call(index)) for index in range(BUFFERS)}
    context.synchronize()
    for index in range(BUFFERS):
        call(index)
    context.synchronize()
    return results


def _copied(result: Result) -> Result:
    return result.clone() if isinstance(result, torch.Tensor) else tuple(one.clone() for one in result)


def _spoil(result: Result) -> None:
    """What no call gives, so that a replay that writes nothing is found."""
    for one in (result,) if isinstance(result, torch.Tensor) else result:
        one.fill_(float("nan") if one.is_floating_point() else torch.iinfo(one.dtype).min)


def _check_replay(context: Context, graph: timing.Graph, problem: Checked, exact: bool) -> Verdict:
    for result in graph.results.values():
        _spoil(result)
    context.synchronize()
    context.world.barrier()
    graph.replay()
    context.synchronize()
    return _agree(context, problem.judge(graph.results, exact))


def _agree(context: Context, verdict: Verdict) -> Verdict:
    said: Sequence[bytes] = context.world.exchange(json.dumps([verdict.correct, verdict.max_error]).encode())
    return worst([Verdict(*json.loads(one)) for one in said])
