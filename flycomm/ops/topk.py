# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.flycomm.topk``: the exact k best scores of each row on one device, the same bits every time.

``topk(Tensor scores, int k, Tensor? lengths=None, str order="score", str tie_break="low", Tensor(a!)? workspace=None)
-> (Tensor scores, Tensor ids, Tensor counts)``

The order is total: by score, then by id (the column), the lower one first, or with ``tie_break="high"`` the higher. -0
counts as +0 and comes out so; NaN ranks as -inf and comes out so. Needs no communicator.
"""

from __future__ import annotations

from functools import cache

import torch

from flycomm import targets
from flycomm.errors import UsageError
from flycomm.kernels import compiled
from flycomm.kernels._topk_plan import Plan, plan
from flycomm.kernels.topk_local import specialization
from flycomm.ops._library import op
from flycomm.ops._topk_arguments import (
    ALIGNMENT,
    DTYPES,
    ORDERS,
    TIE_BREAKS,
    check_call,
    check_numbers,
    check_workspace,
)

_SCHEMA = (
    'topk(Tensor scores, int k, Tensor? lengths=None, str order="score", str tie_break="low", '
    "Tensor(a!)? workspace=None) -> (Tensor, Tensor, Tensor)"
)
Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _fake(
    scores: torch.Tensor,
    k: int,
    lengths: torch.Tensor | None = None,
    order: str = "score",
    tie_break: str = "low",
    workspace: torch.Tensor | None = None,
) -> Result:
    shape = (scores.shape[0], k)
    return (
        scores.new_empty(shape, dtype=torch.float32),
        scores.new_empty(shape, dtype=torch.int32),
        scores.new_empty(shape[:1], dtype=torch.int32),
    )


@op(_SCHEMA, _fake)
def topk_local(
    scores: torch.Tensor,  # (rows, columns) f32, f16 or bf16; columns side by side, rows any stride apart
    k: int,  # 1 … 2048
    lengths: torch.Tensor | None = None,  # (rows,) i32: columns that a row has; None: all
    order: str = "score",
    tie_break: str = "low",
    workspace: torch.Tensor | None = None,
) -> Result:
    """The k best of each row: f32 scores and i32 ids (rows, k), i32 counts (rows,).

    ``order``: "score", best first, or "index", lowest id first. A row with fewer than k columns gets these, then ids -1
    and scores -inf; ``counts`` says how many. Columns beyond a row's length are never read; a length beyond the columns
    counts as all of them, a negative one as 0. One launch on the current stream; may be captured, also to be replayed
    with other lengths.

    Long rows are worked on by several blocks, which meet in ``workspace``: see :func:`topk_workspace`. Left out, one is
    made for this call; in a graph capture it has to be given. Raises :class:`UsageError` for what it cannot take.
    """
    check_call(scores, k, lengths, order, tie_break)
    target = targets.active()
    device = scores.device.index or 0
    rows, columns = scores.shape
    chosen = _plan(columns, k)
    ids = torch.empty((rows, k), dtype=torch.int32, device=scores.device)
    best, counts = torch.empty_like(ids, dtype=torch.float32), ids.new_empty(rows)
    if rows == 0:
        return best, ids, counts
    if chosen.row_bytes:
        if workspace is None and target.runtime.is_capturing(device):
            raise UsageError(f"{columns} columns need a workspace, which a capture cannot make; pass topk_workspace(…)")
        if workspace is None:
            workspace = topk_workspace(rows, columns, k, scores.device)
        check_workspace(workspace, scores, rows * chosen.row_bytes)
    wide = scores.data_ptr() % ALIGNMENT == 0 and scores.stride(0) * scores.element_size() % ALIGNMENT == 0
    kernel = compiled(
        specialization(chosen, DTYPES[scores.dtype], order == ORDERS[0], tie_break == TIE_BREAKS[0], wide)
    )
    kernel(
        scores.data_ptr(),
        0 if lengths is None else lengths.data_ptr(),
        best.data_ptr(),
        ids.data_ptr(),
        counts.data_ptr(),
        workspace.data_ptr() if workspace is not None and chosen.row_bytes else 0,
        rows,
        columns,
        scores.stride(0),
        k,
        target.runtime.current_stream(device),
    )
    target.raise_pending()
    return best, ids, counts


def topk_workspace(rows: int, columns: int, k: int, device: torch.device | str) -> torch.Tensor:
    """A workspace for :func:`topk_local` of up to ``rows`` rows of up to ``columns`` columns, and this ``k``.

    A u8 tensor, zeroed; empty where one block does a row. Every call leaves it as it was. Calls that share one must be
    ordered: by one stream, or by events.
    """
    check_numbers(columns, k, rows)
    return torch.zeros(rows * _plan(columns, k).row_bytes, dtype=torch.uint8, device=device)


@cache
def _plan(columns: int, k: int) -> Plan:
    return plan(targets.active().runtime.torch_device_type == "cpu", max(1, columns), k)
