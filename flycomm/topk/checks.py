# SPDX-License-Identifier: Apache-2.0
"""What a caller of ``topk_exchange`` may pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flycomm.dtypes import REDUCIBLE
from flycomm.errors import UsageError
from flycomm.indexer.shard import ShardLayout
from flycomm.kernels._topk_exchange_plan import CLASSES
from flycomm.kernels.topk_exchange import MODES
from flycomm.primitives.candidates import ID_BITS
from flycomm.session import Session
from flycomm.topk.choice import ALGOS
from flycomm.validate import check_tensor, whole

ORDERS = ("score", "index")
TIE_BREAKS = ("low", "high")
DTYPES = {getattr(torch, dtype.torch_name): name for name, dtype in REDUCIBLE.items()}


def check(
    session: Session,
    scores: torch.Tensor,
    k: int,
    lengths: torch.Tensor | None,
    layout: ShardLayout,
    mode: str,
    order: str,
    tie_break: str,
    ids: torch.Tensor | None,
    owners: torch.Tensor | None,
    forced: tuple[int, int],
    local_lengths: bool,
    algo: str,
) -> tuple[int, int]:
    """Rows and columns, or :class:`UsageError`."""
    for name, value, values in (
        ("mode", mode, MODES),
        ("order", order, ORDERS),
        ("tie_break", tie_break, TIE_BREAKS),
        ("algo", algo, ALGOS),
    ):
        if value not in values:
            raise UsageError(f"{name}={value!r} is not one of {', '.join(values)}; use one of these")
    session.check_device(scores)
    if scores.dim() != 2 or scores.dtype not in DTYPES:
        raise UsageError(
            f"scores are {scores.dim()}-dimensional {scores.dtype}; pass (rows, columns) of "
            f"{', '.join(DTYPES.values())}"
        )
    rows, columns = scores.shape
    if scores.numel() > 1 and columns > 1 and scores.stride(1) != 1:
        raise UsageError(f"columns are {scores.stride(1)} elements apart, not 1; pass scores.contiguous()")
    if not whole(k) or not 1 <= k <= CLASSES[-1]:
        raise UsageError(f"k={k!r} is not in 1..{CLASSES[-1]}; select in parts")
    if not isinstance(layout, ShardLayout):
        raise UsageError(f"layout={layout!r} is not a ShardLayout; pass one of {session.world.size} ranks")
    if layout.world != session.world.size:
        raise UsageError(
            f"the layout is over {layout.world} ranks, the communicator over {session.world.size}; use its size"
        )
    if ids is None and layout.end(columns) > 1 << ID_BITS:
        raise UsageError(
            f"global ids up to {layout.end(columns)} are over the {1 << ID_BITS} that a key holds; use blocks"
        )
    for name, one in (("lengths", lengths), ("owners", owners)):
        check_tensor(name, one, optional=True)
        if one is not None and (
            one.shape != (rows,) or one.dtype != torch.int32 or one.device != scores.device or not one.is_contiguous()
        ):
            raise UsageError(
                f"{name} are {tuple(one.shape)} {one.dtype} on {one.device}; pass a contiguous int32 tensor of {rows} "
                "beside the scores"
            )
    if owners is not None and mode != "owner":
        raise UsageError(f"owners are given with mode={mode!r}; use mode='owner'")
    if not isinstance(forced, Sequence) or len(forced) != 2 or not whole(*forced):
        raise UsageError(f"forced={forced!r} is not two numbers of keys; pass how many first and how many last ones")
    if any(forced) and (min(forced) < 0 or sum(forced) > k or lengths is None or local_lengths or ids is not None):
        raise UsageError(
            f"forced={forced} with k={k} needs counts of at least 0, at most k together, and scores with global lengths"
        )
    if ids is not None:
        _check_given(scores, ids, k)
    return rows, columns


def _check_given(scores: torch.Tensor, ids: torch.Tensor, k: int) -> None:
    check_tensor("ids", ids)
    like = ids.shape == scores.shape and ids.stride() == scores.stride() and ids.device == scores.device
    if not like or scores.shape[1] != k or scores.dtype != torch.float32 or ids.dtype != torch.int32:
        raise UsageError(
            f"ids are {tuple(ids.shape)} {ids.dtype}, scores {tuple(scores.shape)} {scores.dtype}; pass (rows, {k}) "
            "int32 and float32 alike"
        )
