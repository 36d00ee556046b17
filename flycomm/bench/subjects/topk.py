# SPDX-License-Identifier: Apache-2.0
"""The top-k of one device: flycomm's op, its inputs, and what must come out: scores, ids and counts to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch

from flycomm.bench.contender import Contender, Context
from flycomm.bench.problem import BUFFERS, Case
from flycomm.bench.reference import DTYPES, Verdict, make_input, worst
from flycomm.bench.subjects.best import Best, best
from flycomm.kernels._topk_plan import plan
from flycomm.ops.topk import topk_workspace


class TopkInput(NamedTuple):
    scores: torch.Tensor  # (rows, columns)
    k: int


class TopkProblem:
    """Scores on the device, and on the CPU the best of them, one of each a buffer; other scores on every rank."""

    def __init__(self, context: Context, case: Case):
        rows, columns, k = case.rows or 0, case.columns or 0, case.k or 0
        self.inputs: list[TopkInput] = []
        self._expected: list[Best] = []
        for buffer in range(BUFFERS):
            scores = make_input(context.world.rank, buffer, rows * columns, DTYPES[case.dtype]).view(rows, columns)
            values, ids = best(scores, k)
            self.inputs.append(TopkInput(scores.to(context.device), k))
            self._expected.append(Best(values, ids, torch.full((rows,), k), scores.float(), values))

    def judge(self, results: dict[int, Sequence[torch.Tensor]], exact: bool) -> Verdict:
        return worst([self._expected[index].judge(found, exact) for index, found in results.items()])


class FlycommTopk(Contender):
    """With one workspace for all buffers, whose calls are in one stream."""

    name = "flycomm"
    does: ClassVar = {"topk": (None,)}

    def prepare(self, context: Context, inputs: Sequence[TopkInput]) -> None:
        self._inputs = list(inputs)
        scores, k = inputs[0]
        rows, columns = scores.shape
        self._workspace = topk_workspace(rows, columns, k, context.device)

    def call(self, index: int) -> tuple[torch.Tensor, ...]:
        scores, k = self._inputs[index]
        found: tuple[torch.Tensor, ...] = torch.ops.flycomm.topk(scores, k, workspace=self._workspace)
        return found


def protocol(context: Context, case: Case, captured: bool) -> str:
    """How many blocks share a row."""
    blocks = plan(context.device.type == "cpu", case.columns or 0, case.k or 0).blocks
    return "1 block a row" if blocks == 1 else f"{blocks} blocks a row"
