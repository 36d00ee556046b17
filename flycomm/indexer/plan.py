# SPDX-License-Identifier: Apache-2.0
"""What a decode step's rows see, and which share of it is this rank's: made once a step, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flycomm.indexer.kinds import Indexer
from flycomm.indexer.shard import ShardLayout
from flycomm.kernels import indexer_plan as kernel


@dataclass(frozen=True)
class StepPlan:
    """One step of ``requests`` requests with ``rows`` query rows together; all tensors i32, on the device.

    A row makes one selection, or one for each index head: a *list*, ``row * lists + head``. A rank's share of a
    sequence is read page by page: its page ``i`` is entry ``page_first + i * page_step`` of the request's block table.
    """

    rows: int
    requests: int
    alone: bool  # no exchange: this rank's share is all
    page_first: int
    page_step: int
    request_of_row: torch.Tensor  # (rows,) 0 for a row of none, which sees nothing
    visible: torch.Tensor  # (rows,) tokens of the sequence that a row sees
    share: torch.Tensor  # (rows,) tokens of this rank's share that it sees
    lengths: torch.Tensor  # (lists,) keys of the sequence that a list sees
    share_lengths: torch.Tensor  # (lists,) keys of this rank's share; alone, 0 where another rank needs the list
    first_row: torch.Tensor  # (requests,)
    row_count: torch.Tensor  # (requests,)
    pages: torch.Tensor  # (requests,) pages of this rank's share that the request fills
    pinned: torch.Tensor | None  # (lists, forced) i64: alone, the keys that are forced


class Planner:
    """Makes the plans of one indexer on one rank.

    ``session``: of the communicator; ``layout``: in tokens; ``page``: tokens of a page of the cache; ``most``: tokens
    of the longest sequence; ``owners``: i32 (rows × lists,), which rank needs a list, or None if all do.

    A *sharded* cache has a rank's own tokens alone, one after the other, and block tables of its own. A *replicated*
    one has all of them, and a rank reads only whole pages that are its share: page by page in turn, or one run.
    """

    def __init__(
        self,
        session: Any,  # Session: its room stands below this one
        indexer: Indexer,
        layout: ShardLayout,
        page: int,
        most: int,
        cache: str,
        owners: torch.Tensor | None,
    ):
        self.session = session
        self.indexer = indexer
        self.layout = layout
        self.page = page
        self.most = most
        self.cache = cache
        self.owners = owners
        kernels = (kernel.specialization(indexer.lists, indexer.forced, ragged) for ragged in (False, True))
        self.kernels = [session.load(one) for one in kernels]

    def __call__(
        self,
        seq_lens: torch.Tensor,  # (requests,) i32, tokens
        queries: int | torch.Tensor,
        rows: int,
        alone: bool,
    ) -> StepPlan:
        """The plan of a step: one launch on the current stream, which may be captured and replayed.

        ``queries``: rows of every request, or i32 (requests + 1,): where each one's rows begin, and their end.
        """
        requests, lists = seq_lens.shape[0], rows * self.indexer.lists
        out = torch.empty(_words(rows, requests, self.indexer.lists), dtype=torch.int32, device=seq_lens.device)
        forced = sum(self.indexer.forced) if alone else 0
        pinned = torch.empty((lists, forced), dtype=torch.int64, device=seq_lens.device) if forced else None
        owners = self.owners if alone else None
        ragged = isinstance(queries, torch.Tensor)
        world, rank = (1, 0) if alone else (self.layout.world, self.session.world.rank)
        addresses = [0 if one is None else one.data_ptr() for one in (owners, out, pinned)]
        self.kernels[ragged](
            seq_lens.data_ptr(),
            queries.data_ptr() if isinstance(queries, torch.Tensor) else 0,
            *addresses,
            rows,
            requests,
            0 if isinstance(queries, torch.Tensor) else queries,
            self.most,
            rank,
            world,
            self.layout.granule,
            self.indexer.block,
            self.page,
            self.session.world.rank,
            max(1, -(-max(rows, requests) // kernel.THREADS)),
            self.session.stream(),
        )
        self.session.target.raise_pending()
        parts = kernel.sections(rows, requests, self.indexer.lists)
        named = {name: out[first : first + size] for name, (first, size) in parts.items()}
        first, step = self.pages(alone)
        return StepPlan(rows, requests, alone, first, step, pinned=pinned, **named)

    def pages(self, alone: bool) -> tuple[int, int]:
        """The first page of this rank's share in a block table, and how far apart they are."""
        if alone or self.cache == "sharded":
            return 0, 1
        rank = self.session.world.rank
        if self.layout.granule == self.page:
            return rank, self.layout.world
        return rank * (self.layout.granule // self.page), 1


def _words(rows: int, requests: int, lists: int) -> int:
    return sum(size for _, size in kernel.sections(rows, requests, lists).values())
