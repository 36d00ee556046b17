# SPDX-License-Identifier: Apache-2.0
"""What a caller of ``IndexerCP`` may pass, in sentences."""

from __future__ import annotations

from typing import Any

import torch

from flycomm.errors import UsageError
from flycomm.indexer.kinds import Indexer
from flycomm.indexer.plan import StepPlan
from flycomm.indexer.shard import ShardLayout
from flycomm.kernels._topk_exchange_plan import CLASSES
from flycomm.kernels.topk_exchange import MODES
from flycomm.primitives.candidates import ID_BITS
from flycomm.validate import check_tensor, whole

CACHES = ("sharded", "replicated")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "cache": CACHES,
    "mode": MODES,
    "order": ("score", "index"),
    "tie_break": ("low", "high"),
    "parallel": (None, True, False),
}


def check_indexer(
    indexer: Indexer, layout: ShardLayout, world: int, rows: int, page: int, most: int, **choices: Any
) -> None:
    """Raise :class:`UsageError` for what this indexer, these ranks or this cache cannot have.

    ``choices``: ``cache``, ``mode``, ``order``, ``tie_break`` and ``parallel`` of ``IndexerCP``.
    """
    for name, one, kind in (("indexer", indexer, Indexer), ("layout", layout, ShardLayout)):
        if not isinstance(one, kind):
            raise UsageError(f"{name}={one!r} is not of flycomm.indexer's; pass {kind.__name__}(…)")
    granule = layout.granule
    for name, values in _CHOICES.items():
        if choices[name] not in values:
            shown = ", ".join(map(str, values))
            raise UsageError(f"{name}={choices[name]!r} is not one of {shown}; use one of these")
    if not whole(rows, page, most):
        raise UsageError(f"rows={rows!r}, page={page!r} and max_tokens={most!r} are counts; pass whole numbers")
    if layout.world != world:
        raise UsageError(f"the layout is over {layout.world} ranks, the communicator over {world}; use its size")
    if min(rows, page, most) < 1:
        raise UsageError(f"{rows} rows, pages of {page} and at most {most} tokens; each is at least 1")
    if indexer.k > CLASSES[-1]:
        raise UsageError(f"k={indexer.k} keys of a list are over {CLASSES[-1]}; keep fewer")
    if most > indexer.block << ID_BITS:
        raise UsageError(
            f"max_tokens={most} are over the {indexer.block << ID_BITS} whose keys of {indexer.block} have ids of "
            f"{ID_BITS} bits; lower it"
        )
    if page % indexer.block or granule % indexer.block:
        raise UsageError(
            f"pages of {page} tokens dealt out by {granule} cut keys of {indexer.block}; use multiples of these"
        )
    one_run = granule % page == 0 and granule * world >= most
    if choices["cache"] == "replicated" and world > 1 and granule != page and not one_run:
        raise UsageError(
            f"a granule of {granule} tokens is not a page of {page}, nor all of a rank's {most} tokens, which a "
            f"replicated cache needs; use ShardLayout({world}, {page}), or contiguous runs of whole pages"
        )


def check_lengths(seq_lens: torch.Tensor) -> None:
    """Raise :class:`UsageError` for what has no number of requests."""
    check_tensor("seq_lens", seq_lens)
    if seq_lens.dim() != 1:
        raise UsageError(f"seq_lens are {tuple(seq_lens.shape)}; pass (requests,) int32")


def check_table(block_table: torch.Tensor, plan: StepPlan) -> None:
    """Raise :class:`UsageError` for a block table that is not this plan's."""
    if not isinstance(plan, StepPlan):
        raise UsageError(f"the plan is a {type(plan).__name__}; pass what IndexerCP.plan() made")
    check_tensor("the block table", block_table)
    requests = block_table.shape[0] if block_table.dim() else 0
    if requests != plan.requests:
        raise UsageError(
            f"the block table is of {requests} requests, the plan of {plan.requests}; pass the step's (requests, pages)"
        )


def check_step(seq_lens: torch.Tensor, queries: int | torch.Tensor, rows: int, most: int, device: torch.device) -> None:
    """Raise :class:`UsageError` for what is no step of up to ``most`` rows."""
    requests = seq_lens.shape[0]
    if not whole(rows) or not (isinstance(queries, torch.Tensor) or whole(queries)):
        raise UsageError(
            f"rows={rows!r} and queries={queries!r} are counts; pass whole numbers, or queries as a tensor"
        )
    given = {"seq_lens": (seq_lens, requests)}
    if isinstance(queries, torch.Tensor):
        given["queries"] = queries, requests + 1
    elif queries < 0 or queries * requests > rows:
        raise UsageError(f"{requests} requests of {queries} query rows are not within {rows} rows; pass more rows")
    for name, (one, size) in given.items():
        if one.shape != (size,) or one.dtype != torch.int32 or one.device != device or not one.is_contiguous():
            raise UsageError(
                f"{name} are {tuple(one.shape)} {one.dtype} on {one.device}; pass a contiguous int32 tensor of {size} "
                f"on {device}"
            )
    if not 0 <= rows <= most:
        raise UsageError(f"{rows} query rows are not within the {most} that IndexerCP was made for; make a larger one")
