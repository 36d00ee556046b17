# SPDX-License-Identifier: Apache-2.0
"""A step of a context-parallel indexer and a projection, in one launch, on a communicator."""

from __future__ import annotations

import zlib
from functools import partial
from typing import NamedTuple

import torch

from flycomm import targets
from flycomm.communicator import Communicator
from flycomm.errors import UsageError
from flycomm.indexer import IndexerCP, IndexScores, StepPlan
from flycomm.indexer._checks import check_table
from flycomm.indexer.selection import TopK
from flycomm.kernels._topk_exchange_plan import k_class
from flycomm.kernels.mono_indexer import ROWS, Layer, build, scratch_bytes, slot_bytes
from flycomm.mono._layer import LayerBase, check_tensor
from flycomm.validate import whole


class Indexed(NamedTuple):
    """What :class:`IndexerLayer` returns."""

    found: TopK  # as IndexerCP.decode: (lists, k) f32 and i32, (lists,) i32
    projected: torch.Tensor  # (rows, out) bf16


class IndexerLayer(LayerBase):
    """:meth:`IndexerCP.decode` of one indexer, with a projection in its waits, by :mod:`flycomm.kernels.mono_indexer`.

    ``comm``: a communicator made with ``kernel_channels={channel: (blocks, slot_bytes(blocks, k))}``, a block for each
    list of a step at least; ``indexer``: its ``scorer`` is an :class:`IndexScores`, and its ranks share the scores;
    ``inner``, ``out``: of the projection's weights on one rank; ``threads`` a block: 64, 128, … 1024. Collective: every
    rank makes it, with the same values, before the first launch. Compiles, and allocates the scratch. Plans are the
    indexer's, and so is the room for scores: calls of both are ordered by one stream.

    Raises :class:`ResidencyError`, with the numbers, if the grid cannot be resident as a whole; :class:`UsageError` for
    what the kernel cannot do.
    """

    def __init__(self, comm: Communicator, channel: str, indexer: IndexerCP, inner: int, out: int, threads: int = 256):
        if not isinstance(indexer, IndexerCP) or not whole(inner, out):
            raise UsageError(f"indexer={indexer!r}, inner={inner!r}, out={out!r}; pass an IndexerCP and two numbers")
        scorer, chosen, lists = indexer.scorer, indexer.selector, indexer.rows * indexer.indexer.lists
        if not isinstance(scorer, IndexScores):
            raise UsageError(f"the indexer's scorer is a {type(scorer).__name__}, no kernel's; make it an IndexScores")
        self._shared = comm.world_size > 1  # one rank alone gets all from a plan without shares
        if self._shared and not indexer.parallel:
            raise UsageError(f"the indexer has parallel={indexer.parallel}; make it with parallel=True")
        blocks, k = comm.peers(channel).blocks, indexer.indexer.k
        if lists > blocks or indexer.rows > ROWS[-1]:
            raise UsageError(
                f"{indexer.rows} query rows of {indexer.indexer.lists} lists for {blocks} blocks; at most {ROWS[-1]} "
                "rows, and a block for each list: make the channel's grid larger, or the indexer for fewer rows"
            )
        self.layer = one = Layer(
            scorer.asked,
            k_class(k),
            1 << (chosen.columns[not self._shared] - 1).bit_length(),
            inner,
            out,
            next(rows for rows in ROWS if indexer.rows <= rows),
            chosen.mode,
            chosen.order == "score",
            chosen.tie_break == "low",
            any(indexer.indexer.forced),
        )
        self.indexer, self.scorer = indexer, scorer
        agreed = (one, indexer.layout, indexer.indexer)
        self._tag = zlib.crc32(repr(agreed).encode()) & 0x7FFFFFFF
        scratch, slot = partial(scratch_bytes, one, threads), slot_bytes(blocks, k)
        super().__init__(comm, channel, one.name, build(one), indexer.rows, scratch, slot, threads)

    def __call__(
        self,
        q: torch.Tensor,  # (rows, heads, 128), of the format's query type
        weights: torch.Tensor | None,  # (rows, heads) f32; None for block-max
        cache: torch.Tensor,  # (pages, …), a page's bytes side by side
        block_table: torch.Tensor,  # (requests, pages) i32
        plan: StepPlan,
        x: torch.Tensor,  # (rows, inner) bf16
        projection: torch.Tensor,  # (out, inner) bf16
    ) -> Indexed:
        """What ``indexer.decode`` gives for the first five, to the bit, and ``x @ projection.T``.

        One launch on torch's current stream, always the same one; every rank calls it with as many rows, 1 to the
        indexer's, and with a plan of this indexer that is not ``alone``. May be captured in a graph, and replayed with
        other lengths. Raises :class:`CommTimeout` when an earlier call's wait gave up, as ``comm.check()`` does; of a
        call that failed a list is right, or it is NaN with ids and a count of -1, and the projection is right.
        """
        check_table(block_table, plan)
        one, chosen, rows, device = self.layer, self.indexer.selector, plan.rows, self.comm.device
        k, forced = self.indexer.indexer.k, self.indexer.indexer.forced
        self._enter(rows)
        if plan.alone == self._shared:
            raise UsageError(f"the plan has alone={plan.alone}; make it for this indexer, with parallel=True")
        check_tensor("x", x, (rows, one.inner), torch.bfloat16, device)
        check_tensor("projection", projection, (one.out, one.inner), torch.bfloat16, device)
        plane = chosen.room(plan)
        lists = plane.shape[0]
        found = TopK(
            torch.empty(lists, k, dtype=torch.float32, device=device),
            torch.empty(lists, k, dtype=torch.int32, device=device),
            torch.empty(lists, dtype=torch.int32, device=device),
        )
        projected = torch.empty(rows, one.out, dtype=torch.bfloat16, device=device)
        addresses, numbers = self.scorer.given(q, weights, cache, block_table, plan, plane)
        owners = 0 if chosen.owners is None else chosen.owners.data_ptr()
        made = (tensor.data_ptr() for tensor in (*found, x, projection, projected, self.scratch))
        self.kernel(
            self.peers,
            self._tag,
            *addresses,
            *numbers,
            plan.lengths.data_ptr(),
            owners,
            *made,
            *(lists, k, chosen.keys.granule, *forced, rows),
            self.comm.stream(),
        )
        targets.active().raise_pending()
        return Indexed(found, projected)
