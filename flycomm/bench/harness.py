# SPDX-License-Identifier: Apache-2.0
"""A case: the result of every contender is checked first, then its calls are timed, on all ranks together."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from flycomm.bench import timing
from flycomm.bench.baselines import SETUP_ERRORS, Variants
from flycomm.bench.contender import Contender, Context
from flycomm.bench.reference import DTYPES, Verdict, error_bound, judge, make_input, rank_order_sum, worst
from flycomm.bench.stats import slowest

BUFFERS = 4  # input and output pairs that calls rotate over

T = TypeVar("T")
Guard = Callable[[Callable[[], Any]], Any]


class BaselineError(Exception):
    """A baseline cannot be measured here; raised on all ranks alike, with every rank's reason."""


@dataclass(frozen=True)
class Case:
    num_bytes: int  # of the message
    dtype: str  # a name of dtypes.REDUCIBLE


@dataclass(frozen=True)
class Method:
    """How to time: ``mode`` "graph" or "eager", ``calls`` in a replay or a sample, ``repeats`` of that."""

    mode: str
    calls: int
    repeats: int


@dataclass(frozen=True)
class Outcome:
    """``us`` and ``skew_us`` are None where the result was wrong: that is not timed."""

    us: float | None
    skew_us: float | None
    correct: bool
    max_error: float


class Problem:
    """The data of one case on one rank: inputs on the device, and on the CPU what their sums must be."""

    def __init__(self, context: Context, case: Case):
        self.case = case
        dtype = DTYPES[case.dtype]
        count = case.num_bytes // dtype.itemsize
        self.inputs: list[torch.Tensor] = []
        self.expected: list[torch.Tensor] = []
        self.bounds: list[torch.Tensor] = []
        for buffer in range(BUFFERS):
            terms = [make_input(rank, buffer, count, dtype) for rank in range(context.world.size)]
            self.inputs.append(terms[context.world.rank].to(context.device))
            self.expected.append(rank_order_sum(terms))
            self.bounds.append(error_bound(terms))

    def judge(self, results: dict[int, torch.Tensor], exact: bool) -> Verdict:
        return worst(
            [
                judge(result.cpu().view(-1), self.expected[index], None if exact else self.bounds[index])
                for index, result in results.items()
            ]
        )


def measure(context: Context, contender: Contender, problem: Problem, method: Method, exact: bool) -> Outcome:
    """Check and time one contender. Errors come through as they are: for flycomm itself."""
    return _measure(context, contender, problem, method, exact, lambda step: step())


def measure_best(context: Context, variants: Variants, problem: Problem, method: Method) -> Outcome:
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
    context: Context, contender: Contender, problem: Problem, method: Method, exact: bool, guard: Guard
) -> Outcome:
    guard(lambda: contender.prepare(context, problem.inputs))
    results = guard(lambda: _call_each(context, contender))
    verdict = _agree(context, problem.judge(results, exact))
    samples: list[float] = []
    if verdict.correct and method.mode == "graph":
        graph = guard(lambda: timing.Graph(context, contender.call, BUFFERS, method.calls))
        guard(lambda: contender.captured(context))
        if not contender.in_place:
            verdict = _check_replay(context, graph, problem, exact)
        if verdict.correct:
            samples = graph.time(method.repeats)
        del graph, results  # before the memory that they use goes
    elif verdict.correct:
        samples = timing.eager(context, contender.call, BUFFERS, method.calls, method.repeats)
    context.synchronize()
    context.comm.check()
    gathered = [json.loads(one) for one in context.world.exchange(json.dumps(samples).encode())]
    contender.release(context)
    if not samples:
        return Outcome(None, None, False, verdict.max_error)
    timing_of_all = slowest(gathered)
    return Outcome(timing_of_all.us, timing_of_all.skew_us, True, verdict.max_error)


def _call_each(context: Context, contender: Contender) -> dict[int, torch.Tensor]:
    """The first result of every buffer, copied, after calls that warm up. Inputs are as they were for each of them."""
    context.world.barrier()
    results = {index: contender.call(index).clone() for index in range(BUFFERS)}
    context.synchronize()
    for index in range(BUFFERS):
        contender.call(index)
    context.synchronize()
    return results


def _check_replay(context: Context, graph: timing.Graph, problem: Problem, exact: bool) -> Verdict:
    for result in graph.results.values():
        result.fill_(float("nan"))
    context.synchronize()
    context.world.barrier()
    graph.replay()
    context.synchronize()
    return _agree(context, problem.judge(graph.results, exact))


def _agree(context: Context, verdict: Verdict) -> Verdict:
    said: Sequence[bytes] = context.world.exchange(json.dumps([verdict.correct, verdict.max_error]).encode())
    return worst([Verdict(*json.loads(one)) for one in said])
