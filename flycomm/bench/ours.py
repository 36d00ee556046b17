# SPDX-License-Identifier: Apache-2.0
"""flycomm as a contender: out of place into ready outputs, and through ``torch.ops.flycomm`` for the CPU's time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from flycomm.bench.contender import Contender, Context
from flycomm.bench.problem import Case
from flycomm.bench.reference import DTYPES
from flycomm.dispatch import Plan
from flycomm.dtypes import REDUCTIONS


class Flycomm(Contender):
    name = "flycomm"
    does: ClassVar = {"all_reduce": REDUCTIONS, "all_gather": (None,), "reduce_scatter": REDUCTIONS}

    def prepare(self, context: Context, inputs: Sequence[torch.Tensor]) -> None:
        self._comm = context.comm
        self._collective = context.collective.name
        self._reduction = context.collective.reduction or ""
        self._inputs = list(inputs)
        self._outputs = [context.collective.empty_output(one, context.world.size) for one in inputs]
        share_bytes = min(inputs[0].nbytes, self._outputs[0].nbytes)
        context.comm.prepare([inputs[0].dtype], [share_bytes])

    def call(self, index: int) -> torch.Tensor:
        x, out = self._inputs[index], self._outputs[index]
        if self._collective == "all_gather":
            return self._comm.all_gather_into_tensor(x, out=out)
        if self._collective == "reduce_scatter":
            return self._comm.reduce_scatter_tensor(x, self._reduction, out=out)
        return self._comm.all_reduce(x, self._reduction, out=out)

    def enqueue(self, index: int) -> object:
        x, out, ops = self._inputs[index], self._outputs[index], torch.ops.flycomm
        size, name = self._comm.world_size, self._comm.group_name
        if self._collective == "all_gather":
            return ops.all_gather_into_tensor_out(x, size, name, out=out)
        if self._collective == "reduce_scatter":
            return ops.reduce_scatter_tensor_out(x, self._reduction, size, name, out=out)
        return ops.all_reduce_out(x, self._reduction, name, out=out)

    @staticmethod
    def plan(context: Context, case: Case, captured: bool) -> Plan:
        """What a call of this case uses; protocol "fallback" where the group's own backend does it."""
        what = context.collective
        return context.comm.plan(what.name, DTYPES[case.dtype], case.num_bytes, what.reduction or "", captured)
