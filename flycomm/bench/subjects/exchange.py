# SPDX-License-Identifier: Apache-2.0
"""The top-k over all ranks' scores: flycomm's call, its inputs, and what must come out.

Keys are dealt out one by one: rank ``r`` has the keys ``r``, ``r + world``, … Every row sees all of them. A rank's
scores, ids and counts are compared to the bit with those that one rank would find that has all scores. With
``--given candidates`` each rank's own best k are found before, and what is measured begins with them: scores and local
ids, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch

from flycomm.bench.contender import Contender, Context
from flycomm.bench.problem import BUFFERS, Case
from flycomm.bench.reference import DTYPES, Verdict, make_input, worst
from flycomm.bench.subjects.best import Best, best
from flycomm.kernels._topk_exchange_plan import RADIX_BLOCKS, lane_channels
from flycomm.kernels.topk_exchange import SOURCES
from flycomm.topk.choice import ALGOS, choose


class ExchangeInput(NamedTuple):
    scores: torch.Tensor  # (rows, columns), of this rank; with ids the best of them, f32 (rows, k)
    lengths: torch.Tensor  # (rows,) i32: all keys of all ranks
    k: int
    mode: str
    algo: str
    ids: torch.Tensor | None  # (rows, k) i32: places of the best on this rank, where they have been found


class ExchangeProblem:
    """Inputs on the device, and on the CPU what this rank must get, one of each a buffer."""

    def __init__(self, context: Context, case: Case):
        world, rank = context.world.size, context.world.rank
        rows, columns, k, mode = case.rows or 0, case.columns or 0, case.k or 0, case.exchange_mode or ""
        algo = case.algo or ALGOS[0]
        self.inputs: list[ExchangeInput] = []
        self._expected: list[Best] = []
        for buffer in range(BUFFERS):
            parts = [make_input(one, buffer, rows * columns, DTYPES[case.dtype]) for one in range(world)]
            shards = [one.view(rows, columns) for one in parts]
            lengths = torch.full((rows,), columns * world, dtype=torch.int32)
            found, local = best(shards[rank], k) if case.given == SOURCES[1] else (shards[rank], None)
            ids = None if local is None else local.to(context.device)
            scores = found.to(context.device)
            self.inputs.append(ExchangeInput(scores, lengths.to(context.device), k, mode, algo, ids))
            among = torch.stack(shards, dim=2).view(rows, -1).float()
            values, ids = best(among, k)
            self._expected.append(Best(*on_rank(values, ids, mode, rank, world), among, values))

    def judge(self, results: dict[int, Sequence[torch.Tensor]], exact: bool) -> Verdict:
        """A baseline gives every rank all, whatever the mode."""
        return worst([self._expected[index].judge(found, exact) for index, found in results.items()])


def on_rank(
    values: torch.Tensor, ids: torch.Tensor, mode: str, rank: int, world: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores, ids and counts that ``rank`` gets of all rows' best: every row, its own rows, or its own keys."""
    kept = torch.ones_like(ids, dtype=torch.bool)
    if mode == "owner":
        kept[torch.arange(len(ids)) % world != rank] = False
    elif mode == "shard":
        kept = ids % world == rank
    order = (~kept).int().sort(dim=1, stable=True).indices  # what is kept moves to the front, in order
    kept = kept.gather(1, order)
    scores = values.gather(1, order).where(kept, torch.tensor(float("-inf")))
    return scores, ids.gather(1, order).where(kept, torch.tensor(-1, dtype=ids.dtype)), kept.sum(1)


class FlycommExchange(Contender):
    name = "flycomm"
    does: ClassVar = {"topk_exchange": (None,)}

    def prepare(self, context: Context, inputs: Sequence[ExchangeInput]) -> None:
        self._comm = context.comm
        self._inputs = list(inputs)

    def call(self, index: int) -> tuple[torch.Tensor, ...]:
        scores, lengths, k, mode, algo, ids = self._inputs[index]
        return self._comm.topk_exchange(scores, lengths, k, mode=mode, algo=algo, ids=ids)

    def enqueue(self, index: int) -> object:
        scores, lengths, k, mode, algo, ids = self._inputs[index]
        if ids is not None:  # which the op does not take
            return self.call(index)
        return torch.ops.flycomm.topk_exchange(scores, lengths, k, self._comm.group_name, 1, mode, algo=algo)


def protocol(context: Context, case: Case, captured: bool) -> str:
    """The channel's name, and that a row is split where it is."""
    rows, k, mode = case.rows or 0, case.k or 0, case.exchange_mode or ""
    lanes = lane_channels(context.device.type == "cpu", min(rows, RADIX_BLOCKS), k)
    chosen = choose(lanes, case.algo or ALGOS[0], mode, rows, k, context.world.size)
    return f"{chosen.wire} split" if chosen.algo == "split" else chosen.wire
