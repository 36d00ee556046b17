# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual + RMSNorm: flycomm's call, its inputs, and what must come out.

``residual_out`` of flycomm is compared to the bit with the rank-order sum, rounded, plus the residual. ``normed`` is
compared with f64: flycomm's may be off by half a unit in the last place of the data type, its one rounding, and 2**-19
of its value, which is more than f32 arithmetic over a row loses. A baseline's sum may be off as an all-reduce's may
(``reference.error_bound``), its ``residual_out`` by that and a rounding, and its ``normed`` by what these make of it
and four roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from flycomm.bench.contender import Contender, Context
from flycomm.bench.problem import BUFFERS, Case
from flycomm.bench.reference import DTYPES, Verdict, error_bound, judge, make_input, reduce_in_rank_order, worst
from flycomm.dispatch import Plan
from flycomm.geometry import SYNC, Geometry

EPS = 1e-6
_F32_LOSS = 2.0**-19  # of a value
_RESIDUAL, _WEIGHT = 1000, 1001  # instead of a rank, where inputs are made


class NormInput(NamedTuple):
    x: torch.Tensor  # (rows, hidden), of this rank
    residual: torch.Tensor  # (rows, hidden), the same on all ranks
    weight: torch.Tensor  # (hidden,), the same on all ranks


class Part(NamedTuple):
    given: tuple[torch.Tensor, ...]  # what a call gets beside residual and weight
    term: torch.Tensor  # (rows, hidden): what it comes to
    size: torch.Tensor  # how large what it was made of is: a baseline may be off in proportion


class _Expected(NamedTuple):
    residual: torch.Tensor  # of the data type
    normed: torch.Tensor  # f32, of f64
    tolerance: torch.Tensor  # of flycomm's normed, f32
    residual_bound: torch.Tensor  # of a baseline's, f32
    normed_bound: torch.Tensor


class NormProblem:
    """Inputs on the device, and on the CPU what their results must be, one of each a buffer."""

    def __init__(self, context: Context, case: Case):
        assert case.rows is not None
        assert case.hidden is not None
        dtype, world = DTYPES[case.dtype], context.world.size
        shape = (case.rows, case.hidden)
        self.inputs: list[Any] = []
        self._expected: list[_Expected] = []
        for buffer in range(BUFFERS):
            parts = [self.part(case, rank, buffer) for rank in range(world)]
            residual = make_input(_RESIDUAL, buffer, case.rows * case.hidden, dtype).view(shape)
            weight = make_input(_WEIGHT, buffer, case.hidden, dtype)
            made = (*parts[context.world.rank].given, residual, weight)
            self.inputs.append(self.of(*(one.to(context.device) for one in made)))
            terms, sizes = [one.term for one in parts], [one.size for one in parts]
            self._expected.append(expected(terms, residual, weight, sizes))

    of: ClassVar[Callable[..., Any]] = NormInput

    def part(self, case: Case, rank: int, buffer: int) -> Part:
        """What a rank brings to the sum, on the CPU."""
        assert case.rows is not None
        assert case.hidden is not None
        term = make_input(rank, buffer, case.rows * case.hidden, DTYPES[case.dtype]).view(case.rows, case.hidden)
        return Part((term,), term, term)

    def judge(self, results: dict[int, tuple[torch.Tensor, torch.Tensor]], exact: bool) -> Verdict:
        return worst([verdict for index, found in results.items() for verdict in self._judge(index, found, exact)])

    def _judge(self, index: int, found: tuple[torch.Tensor, torch.Tensor], exact: bool) -> tuple[Verdict, Verdict]:
        normed, residual = (one.cpu() for one in found)
        want = self._expected[index]
        return (
            judge(residual, want.residual, None if exact else want.residual_bound),
            judge(normed, want.normed, want.tolerance if exact else want.normed_bound),
        )


def expected(
    terms: Sequence[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, sizes: Sequence[torch.Tensor]
) -> _Expected:
    """Of CPU tensors, ``terms`` and ``sizes`` one a rank."""
    rounding = torch.finfo(residual.dtype)
    least = rounding.smallest_normal * rounding.eps
    added = reduce_in_rank_order(terms).float() + residual.float()
    wide, factor = added.double(), weight.double()
    scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + EPS)
    normed = wide * scale * factor
    size = normed.abs()
    half_a_unit = torch.ldexp(torch.full_like(normed, rounding.eps / 4), normed.frexp().exponent)
    tolerance = half_a_unit + size * _F32_LOSS + least
    off = error_bound(sizes).double() + wide.abs() * rounding.eps
    of_scale = (off * off).mean(-1, keepdim=True).sqrt() * scale  # how far the root of the mean may be off, relatively
    bound = off * scale * factor.abs() + size * (of_scale + 4 * rounding.eps + _F32_LOSS) + least
    return _Expected(added.to(residual.dtype), normed.float(), tolerance.float(), off.float(), bound.float())


class FlycommNorm(Contender):
    name = "flycomm"
    does: ClassVar = {"all_reduce_norm": (None,)}

    def prepare(self, context: Context, inputs: Sequence[NormInput]) -> None:
        self._comm = context.comm
        self._inputs = list(inputs)
        context.comm.prepare([inputs[0].x.dtype], [inputs[0].x.nbytes])  # of the separate all-reduce

    def call(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._comm.all_reduce_rms_norm(*self._inputs[index], EPS)

    def enqueue(self, index: int) -> object:
        return torch.ops.flycomm.all_reduce_rms_norm(*self._inputs[index], EPS, False, self._comm.group_name)


def protocol(context: Context, case: Case, captured: bool) -> str:
    """Of the one kernel, or "separate", or "fallback" where the group's own backend makes the sum."""
    return plan(context, case, captured).protocol


def grid(context: Context, case: Case, captured: bool) -> Geometry:
    row = plan(context, case, captured).row
    return SYNC if row is None else row.geometry


def plan(context: Context, case: Case, captured: bool) -> Plan:
    """What a call of this case uses."""
    return context.comm.plan_rms_norm(DTYPES[case.dtype], case.rows or 0, case.hidden or 0, captured)
