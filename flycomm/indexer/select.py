# SPDX-License-Identifier: Apache-2.0
"""From the scores of a rank's share to what is kept of the sequence: among all ranks, or alone."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from flycomm.indexer.kinds import Indexer
from flycomm.indexer.nominate import Nominate, room_for
from flycomm.indexer.plan import StepPlan
from flycomm.indexer.selection import TopK
from flycomm.indexer.shard import ShardLayout
from flycomm.kernels._topk_exchange_plan import plan as exchange_plan

_WIDE = 4  # scores in 16 bytes, at multiples of which every row begins


class Selector:
    """Selects for one :class:`IndexerCP`, whose arguments these are; ``routes``: which values ``alone`` may have.

    Keeps one room for scores, which all calls use in turn. A rank's share of scores goes to the exchange as it is where
    a block has registers for it, or keys are forced; else only the best of it do, found by several blocks.
    """

    def __init__(
        self,
        comm: Any,  # Communicator: its room stands below this one
        indexer: Indexer,
        layout: ShardLayout,
        rows: int,
        max_tokens: int,
        mode: str,
        order: str,
        tie_break: str,
        owners: torch.Tensor | None,
        routes: Collection[bool],
        channel: int,
    ):
        self.comm, self.indexer, self.mode, self.order, self.tie_break = comm, indexer, mode, order, tie_break
        self.owners, self.channel = owners, channel
        self.keys = ShardLayout(layout.world, layout.granule // indexer.block)
        keys, lists = -(-max_tokens // indexer.block), rows * indexer.lists
        self.columns = {False: self.keys.local_length(keys, 0), True: keys}  # alone → keys, at most
        widest = max(_padded(self.columns[alone]) for alone in routes)
        self.scores = torch.zeros(lists * widest, dtype=torch.float32, device=comm.device)
        fits = exchange_plan(comm.device.type == "cpu", self.columns[False], indexer.k).columns > 0
        self.nominate = {
            alone: Nominate(
                comm._session,
                lists,
                self.columns[alone],
                indexer.k,
                not alone or order == "score",
                tie_break == "low",
            )
            for alone in routes
            if alone or not (fits or any(indexer.forced))
        }
        self.own = room_for(lists if False in self.nominate else 0, indexer.k, comm.device)

    def room(self, plan: StepPlan) -> torch.Tensor:
        """Where the step's scores are to be written: f32 (lists, columns)."""
        columns, lists = self.columns[plan.alone], plan.rows * self.indexer.lists
        stride = _padded(columns)
        return self.scores[: lists * stride].view(lists, stride)[:, :columns]

    def __call__(self, scores: torch.Tensor, plan: StepPlan) -> TopK:
        """The best of each list, from what :meth:`room` gave."""
        lists, k = scores.shape[0], self.indexer.k
        if plan.alone:
            if plan.pinned is not None:
                scores.scatter_(1, plan.pinned, torch.inf)
            return self.nominate[True](scores, plan.share_lengths, room_for(lists, k, scores.device))
        ids = None
        if False in self.nominate:
            own = TopK(*(one[:lists] for one in self.own))
            scores, ids, _ = self.nominate[False](scores, plan.share_lengths, own)
        found: TopK = self.comm.topk_exchange(
            scores,
            plan.lengths,
            k,
            layout=self.keys,
            mode=self.mode,
            order=self.order,
            tie_break=self.tie_break,
            ids=ids,
            owners=None if self.owners is None else self.owners[:lists],
            forced=self.indexer.forced,
            channel=self.channel,
        )
        return found


def _padded(columns: int) -> int:
    return -(-columns // _WIDE) * _WIDE
