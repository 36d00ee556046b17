# SPDX-License-Identifier: Apache-2.0
"""What a caller of ``IndexerCP`` may pass, in sentences."""

from __future__ import annotations

import torch

from flycomm.errors import UsageError
from flycomm.indexer.kinds import Indexer
from flycomm.indexer.shard import ShardLayout
from flycomm.kernels.topk_exchange import MODES

CACHES = ("sharded", "replicated")


def check_indexer(
    indexer: Indexer, layout: ShardLayout, world: int, rows: int, page: int, most: int, cache: str, mode: str
) -> None:
    """Raise :class:`UsageError` for what this indexer, these ranks or this cache cannot have."""
    granule = layout.granule
    for name, value, values in (("cache", cache, CACHES), ("mode", mode, MODES)):
        if value not in values:
            raise UsageError(f"{name}={value!r} is not one of {', '.join(values)}; use one of these")
    if layout.world != world:
        raise UsageError(f"the layout is over {layout.world} ranks, the communicator over {world}; use its size")
    if min(rows, page, most) < 1:
        raise UsageError(f"{rows} rows, pages of {page} and at most {most} tokens; each is at least 1")
    if page % indexer.block or granule % indexer.block:
        raise UsageError(
            f"pages of {page} tokens dealt out by {granule} cut keys of {indexer.block}; use multiples of these"
        )
    one_run = granule % page == 0 and granule * world >= most
    if cache == "replicated" and world > 1 and granule != page and not one_run:
        raise UsageError(
            f"a granule of {granule} tokens is not a page of {page}, nor all of a rank's {most} tokens, which a "
            f"replicated cache needs; use ShardLayout({world}, {page}), or contiguous runs of whole pages"
        )


def check_step(seq_lens: torch.Tensor, queries: int | torch.Tensor, rows: int, most: int, device: torch.device) -> None:
    """Raise :class:`UsageError` for what is no step of up to ``most`` rows."""
    requests = seq_lens.shape[0]
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
