# SPDX-License-Identifier: Apache-2.0
"""Experts' weighted sum + all-reduce + residual + RMSNorm: the same check as of the norm alone, with other terms.

Every rank has rows of all ``k`` experts, as under tensor parallelism. A term is the sum in f32 in the order of the
experts, rounded: flycomm's ``residual_out`` is compared to the bit. A baseline adds in whatever order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from flycomm.bench.contender import Contender, Context
from flycomm.bench.problem import Case
from flycomm.bench.reference import DTYPES, make_input
from flycomm.bench.subjects.norm import EPS, NormProblem, Part

NAME = "moe_finalize_norm"
_FACTORS = 2000  # added to a rank, where inputs are made


class ExpertInput(NamedTuple):
    out: torch.Tensor  # (rows, k, hidden), of this rank
    factors: torch.Tensor  # (rows, k), of the data type
    residual: torch.Tensor  # (rows, hidden), the same on all ranks
    weight: torch.Tensor  # (hidden,), the same on all ranks


class ExpertProblem(NormProblem):
    of: ClassVar[Callable[..., Any]] = ExpertInput

    def part(self, case: Case, rank: int, buffer: int) -> Part:
        rows, k, hidden, dtype = case.rows or 0, case.k or 0, case.hidden or 0, DTYPES[case.dtype]
        out = make_input(rank, buffer, rows * k * hidden, dtype).view(rows, k, hidden)
        factors = make_input(_FACTORS + rank, buffer, rows * k, dtype).view(rows, k)
        total, size = torch.zeros(2, rows, hidden)
        for one in range(k):
            term = factors[:, one, None].float() * out[:, one].float()
            total, size = total + term, size + term.abs()
        return Part((out, factors), total.to(dtype), size.to(dtype))


class FlycommExperts(Contender):
    name = "flycomm"
    does: ClassVar = {NAME: (None,)}

    def prepare(self, context: Context, inputs: Sequence[ExpertInput]) -> None:
        self._comm = context.comm
        self._inputs = list(inputs)
        context.comm.prepare([inputs[0].residual.dtype], [inputs[0].residual.nbytes])  # of the separate all-reduce

    def call(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._comm.moe_finalize_all_reduce_rms_norm(*self._inputs[index], EPS)

    def enqueue(self, index: int) -> object:
        op, name = torch.ops.flycomm.moe_finalize_all_reduce_rms_norm, self._comm.group_name
        return op(*self._inputs[index], None, None, EPS, False, name)
