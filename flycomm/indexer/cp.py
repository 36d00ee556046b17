# SPDX-License-Identifier: Apache-2.0
"""``IndexerCP``: each rank scores its share of the cached keys, and whoever needs them gets the best of all."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from flycomm.indexer._checks import check_indexer, check_lengths, check_step, check_table
from flycomm.indexer.applies import applies
from flycomm.indexer.kinds import Indexer
from flycomm.indexer.plan import Planner, StepPlan
from flycomm.indexer.select import Selector
from flycomm.indexer.selection import TopK
from flycomm.indexer.shard import ShardLayout


class Scorer(Protocol):
    """Writes the scores of this rank's share, on the current stream, with no host synchronisation.

    ``out``: f32 (lists, columns), rows any stride apart; column ``c`` is this rank's key ``c``. List ``i`` has the
    first ``plan.share_lengths[i]`` keys, and only these are read afterwards; of the tokens in them its row,
    ``i // indexer.lists``, sees the first ``plan.share[row]``. Query and cache are passed on as they are given.
    """

    def __call__(
        self, q: Any, weights: Any, cache: Any, block_table: torch.Tensor, plan: StepPlan, out: torch.Tensor
    ) -> None: ...


class IndexerCP:
    """Context parallelism of one :class:`Indexer` over the ranks of a communicator, for all layers that have it.

    ``comm``: made with ``topk=(lists, k)``, lists being query rows times ``indexer.lists``, or as many of them as there
    usually are. ``layout``: tokens over ranks. ``rows``, ``max_tokens``: the most query rows of a step, and tokens of a
    sequence. ``page``: tokens of a page of the cache; ``cache``: "sharded" if a rank has its own tokens
    only, "replicated" if it has all. ``mode``: who gets a list, as for ``topk_exchange``; in mode "owner" head ``h`` of
    ``H`` goes to rank ``h * world // H``, and the only list of row ``r`` to ``r % world``. ``parallel``: None goes by
    the agreed table (:meth:`applies`); True and False say so, as far as mode and cache let one choose. ``scorer``: see
    :class:`Scorer`.

    Collective to make, with the same values on all ranks, and before the first launch that may wait: it compiles, loads
    and allocates. Calls are made by all ranks in one order, on one stream. They may be captured, after a first one that
    is not; replays go with other lengths and tables.
    """

    def __init__(
        self,
        comm: Any,  # Communicator: its room stands below this one
        indexer: Indexer,
        layout: ShardLayout,
        *,
        rows: int,
        max_tokens: int,
        page: int,
        scorer: Scorer,
        cache: str = "sharded",
        mode: str = "all",
        order: str = "score",
        tie_break: str = "low",
        parallel: bool | None = None,
        channel: int = 0,
    ):
        said = [indexer, layout, rows, max_tokens, page, cache, mode, order, tie_break, parallel, channel]
        session = comm._session
        session.world.agree(repr(said).encode(), "arguments of IndexerCP")
        choices = {"cache": cache, "mode": mode, "order": order, "tie_break": tie_break, "parallel": parallel}
        check_indexer(indexer, layout, comm.world_size, rows, page, max_tokens, **choices)
        self.comm, self.indexer, self.layout, self.scorer = comm, indexer, layout, scorer
        self.rows, self.max_tokens = rows, max_tokens
        self.parallel = parallel if comm.world_size > 1 else False
        if comm.world_size > 1 and (cache == "sharded" or mode == "shard"):
            self.parallel = True  # alone, a rank would not have what it needs
        owners = owners_of(indexer, rows, comm.world_size).to(comm.device) if mode == "owner" else None
        self.planner = Planner(session, indexer, layout, page, max_tokens, cache, owners)
        routes = (False, True) if self.parallel is None else (not self.parallel,)
        self.selector = Selector(
            comm, indexer, layout, rows, max_tokens, mode, order, tie_break, owners, routes, channel
        )

    def applies(self, context: int, rows: int) -> bool:
        """Whether a step of ``rows`` query rows, none of which sees more than ``context`` tokens, shares the scoring.

        The same on all ranks, of which each otherwise scores everything and no exchange is made.
        """
        if self.parallel is not None:
            return self.parallel
        return applies(self.comm.table, self.indexer.kind, self.layout.world, context, rows)

    def plan(
        self,
        seq_lens: torch.Tensor,
        queries: int | torch.Tensor = 1,
        rows: int | None = None,
        context: int | None = None,
    ) -> StepPlan:
        """What every layer's :meth:`decode` of a step needs. One launch.

        ``seq_lens``: i32 (requests,), tokens of each with the step's own; 0 for a place that is not used. ``queries``:
        how many query rows each has, or i32 (requests + 1,): where each one's begin, and their end. ``rows``: of the
        step, with padding (default: all that there are, or all that :class:`IndexerCP` was made for). ``context``: no
        sequence is longer, in tokens, the same on all ranks (default: ``max_tokens``); what it and ``rows`` choose, a
        graph keeps.
        """
        check_lengths(seq_lens)
        if rows is None:
            rows = seq_lens.shape[0] * queries if isinstance(queries, int) else self.rows
        check_step(seq_lens, queries, rows, self.rows, self.comm.device)
        alone = not self.applies(self.max_tokens if context is None else context, rows)
        return self.planner(seq_lens, queries, rows, alone)

    def decode(self, q: Any, weights: Any, cache: Any, block_table: torch.Tensor, plan: StepPlan) -> TopK:
        """``(scores, ids, counts)`` of every list of the step: f32 and i32 (lists, k), i32 (lists,).

        Ids are those of keys: tokens, or blocks. They are what one rank that scores everything would find, whether the
        ranks share the work or not, if a score does not depend on who computes it. ``q``, ``weights`` and ``cache`` go
        to the scorer; ``block_table``: i32 (requests, pages), of this rank's own pages if the cache is sharded. All
        ranks make the call, also with no tokens. Allocates what it returns and no more.
        """
        check_table(block_table, plan)
        scores = self.selector.room(plan)
        self.scorer(q, weights, cache, block_table, plan, scores)
        return self.selector(scores, plan)


def owners_of(indexer: Indexer, rows: int, world: int) -> torch.Tensor:
    """(rows × lists,) i32: which rank needs a list, in mode "owner"."""
    if indexer.lists == 1:
        return torch.arange(rows, dtype=torch.int32) % world
    heads = torch.arange(indexer.lists, dtype=torch.int32) * world // indexer.lists
    return heads.repeat(rows)
