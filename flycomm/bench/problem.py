# SPDX-License-Identifier: Apache-2.0
"""A case: how much of which dtype. A problem: its data on one rank, and what must come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from flycomm.bench.contender import Context
from flycomm.bench.reference import DTYPES, Verdict, judge, make_input, worst

BUFFERS = 4  # input and output pairs that calls rotate over


@dataclass(frozen=True)
class Case:
    """One size; what means nothing to the subject is None."""

    num_bytes: int  # of a rank: the message of an all-reduce, the shard of a gather or scatter, the scores of a top-k
    dtype: str  # a name of dtypes.REDUCIBLE; of an indexer the format of its cache
    rows: int | None = None
    hidden: int | None = None  # elements of a row to be normed
    intermediate: int | None = None  # of a feed-forward layer, on a rank
    projection: int | None = None  # columns of what follows it, on a rank
    grid: str | None = None  # "128x256" where it is to be chosen and was not left to the subject
    columns: int | None = None  # scores of a row, on a rank
    k: int | None = None
    exchange_mode: str | None = None  # of kernels.topk_exchange.MODES
    algo: str | None = None  # of topk.choice.ALGOS, where it was not left to the call
    given: str | None = None  # of kernels.topk_exchange.SOURCES, where it is not the scores
    kind: str | None = None  # of an indexer: whose cache has num_bytes, of all tokens
    context: int | None = None  # tokens of a request
    requests: int | None = None
    query_rows: int | None = None  # of a request
    heads: int | None = None  # index heads, where they are not the kind's; so with its k

    def fields(self) -> dict[str, Any]:
        """As in a row of results."""
        fields = asdict(self)
        return {"bytes": fields.pop("num_bytes"), **fields}


class Checked(Protocol):
    """A case's data on one rank. ``inputs``: one a buffer, what a contender's ``prepare`` takes."""

    @property
    def inputs(self) -> Sequence[Any]: ...

    def judge(self, results: dict[int, Any], exact: bool) -> Verdict:
        """Whether the results of these buffers are right: ``exact``, as flycomm's must be, or as a baseline's may."""


class Problem:
    """Of a collective: inputs on the device, and on the CPU what their results must be, one of each a buffer."""

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
