# SPDX-License-Identifier: Apache-2.0
"""The top-k over all ranks' scores as an op; the contract is :func:`flycomm.topk.topk_exchange`'s."""

from __future__ import annotations

import torch

from flycomm.indexer.shard import ShardLayout
from flycomm.ops._library import op
from flycomm.ops.registry import lookup

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _fake(
    scores: torch.Tensor,
    lengths: torch.Tensor | None,
    k: int,
    group_name: str,
    granule: int = 1,
    mode: str = "all",
    order: str = "score",
    tie_break: str = "low",
    algo: str = "auto",
) -> Result:
    shape = (scores.shape[0], k)
    ids = scores.new_empty(shape, dtype=torch.int32)
    return scores.new_empty(shape, dtype=torch.float32), ids, ids.new_empty(shape[:1])


@op(
    "topk_exchange(Tensor scores, Tensor? lengths, int k, str group_name, int granule=1, str mode='all',"
    " str order='score', str tie_break='low', str algo='auto') -> (Tensor, Tensor, Tensor)",
    _fake,
)
def topk_exchange(
    scores: torch.Tensor,  # (rows, columns) of this rank
    lengths: torch.Tensor | None,  # (rows,) i32: keys of the whole sequence that a row sees
    k: int,
    group_name: str,
    granule: int = 1,  # keys that are dealt out to a rank at a time
    mode: str = "all",
    order: str = "score",
    tie_break: str = "low",
    algo: str = "auto",
) -> Result:
    """Scores, global ids and counts of the ``k`` best of each row."""
    communicator = lookup(group_name)
    layout = ShardLayout(communicator.world_size, granule)
    found: Result = communicator.topk_exchange(
        scores, lengths, k, layout=layout, mode=mode, order=order, tie_break=tie_break, algo=algo
    )
    return tuple(found)  # type: ignore[return-value]
