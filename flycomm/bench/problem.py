# SPDX-License-Identifier: Apache-2.0
"""A case: how much of which dtype. A problem: its data on one rank, and what must come out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flycomm.bench.contender import Context
from flycomm.bench.reference import DTYPES, Verdict, judge, make_input, worst

BUFFERS = 4  # input and output pairs that calls rotate over


@dataclass(frozen=True)
class Case:
    num_bytes: int  # one rank's share: the message of an all-reduce, the shard of the others
    dtype: str  # a name of dtypes.REDUCIBLE


class Problem:
    """Inputs on the device, and on the CPU what their results must be, one of each a buffer."""

    def __init__(self, context: Context, case: Case):
        self.case = case
        dtype, world, rank = DTYPES[case.dtype], context.world.size, context.world.rank
        count = context.collective.input_numel(case.num_bytes // dtype.itemsize, world)
        self.inputs: list[torch.Tensor] = []
        self.expected: list[torch.Tensor] = []
        self.bounds: list[torch.Tensor | None] = []
        for buffer in range(BUFFERS):
            inputs = [make_input(one, buffer, count, dtype) for one in range(world)]
            self.inputs.append(inputs[rank].to(context.device))
            self.expected.append(context.collective.expected(inputs, rank))
            self.bounds.append(context.collective.bound(inputs, rank))

    def judge(self, results: dict[int, torch.Tensor], exact: bool) -> Verdict:
        return worst(
            [
                judge(result.cpu().view(-1), self.expected[index], None if exact else self.bounds[index])
                for index, result in results.items()
            ]
        )
