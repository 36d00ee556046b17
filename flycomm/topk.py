# SPDX-License-Identifier: Apache-2.0
"""The host's side of a top-k over scores that are spread over the ranks: classes, outputs, launches."""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from flycomm.dtypes import REDUCIBLE
from flycomm.errors import UsageError
from flycomm.geometry import Geometry
from flycomm.indexer.shard import ShardLayout
from flycomm.kernels import topk_exchange as kernel
from flycomm.kernels._topk_exchange_plan import CLASSES, MAX_ROWS, channel_name, k_class, plan
from flycomm.layout import Key
from flycomm.primitives.candidates import ID_BITS
from flycomm.session import Session

ORDERS = ("score", "index")
TIE_BREAKS = ("low", "high")
_ALIGNMENT = 16  # bytes
_DTYPES = {getattr(torch, dtype.torch_name): name for name, dtype in REDUCIBLE.items()}


class TopK(NamedTuple):
    """Of each row: f32 scores and i32 global ids (rows, k), i32 counts (rows,)."""

    scores: torch.Tensor
    ids: torch.Tensor
    counts: torch.Tensor


def topk_exchange(
    session: Session,
    scores: torch.Tensor,  # (rows, columns) f32, f16 or bf16: this rank's; rows any stride apart
    k: int,
    lengths: torch.Tensor | None = None,  # (rows,) i32
    *,
    layout: ShardLayout | None = None,
    mode: str = "all",
    order: str = "score",
    tie_break: str = "low",
    ids: torch.Tensor | None = None,  # (rows, k) i32
    owners: torch.Tensor | None = None,  # (rows,) i32
    forced: tuple[int, int] = (0, 0),
    local_lengths: bool = False,
    channel: int = 0,
) -> TopK:
    """The k best of each row over all ranks' scores, with global ids: exactly what one rank with all scores would find.

    The order is total: by score (-0 is +0; NaN is -inf), then by global id, the lower first, or with
    ``tie_break="high"`` the higher; output is in that order, or with ``order="index"`` by rising id. Rows with fewer
    than ``k`` visible keys end in ids -1 and scores -inf; ``counts`` says how many they have. Deterministic to the bit.

    ``layout``: where the keys are (default: dealt out one by one). ``lengths``: how many keys of the whole sequence a
    row sees, alike on all ranks, or with ``local_lengths`` how many of its own this rank has; no score beyond is read.
    ``forced``: the first and the last so many keys that a row sees are among its best, with the score +inf; their sum
    is at most ``k``. With ``ids``, ``scores`` are the (rows, k) f32 local best that another kernel has found, and
    ``ids`` their local positions, -1 for none; ``lengths`` are not used.

    ``mode``: "all" gives every rank every row; "shard" gives a rank those of the best that are its own; "owner" gives
    row ``r`` to rank ``r % world``, or ``owners[r]`` (alike on all ranks), and padding to the others. One launch on the
    current stream, with a block a row; may be captured, and replayed with other scores, lengths and owners. All ranks
    make the call, also with no keys, with the same arguments but for scores and local lengths.
    """
    session.enter()
    world = session.world.size
    layout = layout or ShardLayout(world)
    rows, columns = _check(
        session, scores, k, lengths, layout, mode, order, tie_break, ids, owners, forced, local_lengths
    )
    out = torch.empty((rows, k), dtype=torch.int32, device=scores.device)
    best, counts = torch.empty_like(out, dtype=torch.float32), out.new_empty(rows)
    if rows == 0:
        return TopK(best, out, counts)
    session.roll_call("topk_exchange", f"{mode} {k} {order} {tie_break} {forced}", (rows,), str(layout))
    wire = channel_name(mode, k)
    grid, capacity = session.lane_channels.get(wire, (Geometry(0, 0), 0))
    if rows > grid.blocks:
        raise UsageError(
            f"{rows} rows with k={k} are over the {grid.blocks} that this communicator has channels for; pass "
            f"topk=({rows}, {k}) to init"
        )
    captured, stream = session.is_capturing(), session.stream()
    peers = session.peers(Key(channel, captured, wire, grid, capacity))
    session.claim(channel, captured, stream)
    chosen = plan(session.device.type == "cpu", columns, k)
    wide = scores.data_ptr() % _ALIGNMENT == 0 and scores.stride(0) * scores.element_size() % _ALIGNMENT == 0
    given = ids is not None
    one = kernel.specialization(
        mode,
        kernel.SOURCES[given],
        0 if given else chosen.columns,
        chosen.k,
        order == ORDERS[0],
        tie_break == TIE_BREAKS[0],
        wide or given,
        any(forced),
        world,
        _DTYPES[scores.dtype],
        peers.blocks,
        chosen.threads,
    )
    handle = session.load(one)
    addresses = [0 if one is None else one.data_ptr() for one in (scores, ids, lengths, owners)]
    handle(
        peers,
        _tag(mode, k, rows, layout, order, tie_break, forced),
        *addresses,
        best.data_ptr(),
        out.data_ptr(),
        counts.data_ptr(),
        columns,
        scores.stride(0),
        k,
        layout.granule,
        int(not local_lengths),
        *forced,
        rows,
        stream,
    )
    session.target.raise_pending()
    return TopK(best, out, counts)


@lru_cache(maxsize=4096)
def _tag(*values: Any) -> int:
    """31 bits that peers compare, in tokens: what a call must have alike on all ranks."""
    return zlib.crc32(repr(values).encode()) & 0x7FFFFFFF


def _check(
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
) -> tuple[int, int]:
    """Rows and columns, or :class:`UsageError`."""
    for name, value, values in (
        ("mode", mode, kernel.MODES),
        ("order", order, ORDERS),
        ("tie_break", tie_break, TIE_BREAKS),
    ):
        if value not in values:
            raise UsageError(f"{name}={value!r} is not one of {', '.join(values)}; use one of these")
    if scores.dim() != 2 or scores.dtype not in _DTYPES:
        raise UsageError(
            f"scores are {scores.dim()}-dimensional {scores.dtype}; pass (rows, columns) of {list(_DTYPES)}"
        )
    rows, columns = scores.shape
    session.check_device(scores)
    if scores.numel() > 1 and columns > 1 and scores.stride(1) != 1:
        raise UsageError(f"columns are {scores.stride(1)} elements apart, not 1; pass scores.contiguous()")
    if not 1 <= k <= CLASSES[-1]:
        raise UsageError(f"k={k} is not in 1..{CLASSES[-1]}; select in parts")
    if rows > MAX_ROWS[k_class(k)]:
        raise UsageError(f"{rows} rows with k={k} are over {MAX_ROWS[k_class(k)]}; make several calls")
    if layout.world != session.world.size:
        raise UsageError(
            f"the layout is over {layout.world} ranks, the communicator over {session.world.size}; use its size"
        )
    if ids is None and layout.end(columns) > 1 << ID_BITS:
        raise UsageError(
            f"global ids up to {layout.end(columns)} are over the {1 << ID_BITS} that a key holds; use blocks"
        )
    for name, one in (("lengths", lengths), ("owners", owners)):
        if one is not None and (
            one.shape != (rows,) or one.dtype != torch.int32 or one.device != scores.device or not one.is_contiguous()
        ):
            raise UsageError(
                f"{name} are {tuple(one.shape)} {one.dtype} on {one.device}; pass a contiguous int32 tensor of {rows} "
                "beside the scores"
            )
    if owners is not None and mode != "owner":
        raise UsageError(f"owners are given with mode={mode!r}; use mode='owner'")
    if any(forced) and (min(forced) < 0 or sum(forced) > k or lengths is None or local_lengths or ids is not None):
        raise UsageError(
            f"forced={forced} with k={k} needs counts of at least 0, at most k together, and scores with global lengths"
        )
    if ids is not None:
        _check_given(scores, ids, k)
    return rows, columns


def _check_given(scores: torch.Tensor, ids: torch.Tensor, k: int) -> None:
    like = ids.shape == scores.shape and ids.stride() == scores.stride() and ids.device == scores.device
    if not like or scores.shape[1] != k or scores.dtype != torch.float32 or ids.dtype != torch.int32:
        raise UsageError(
            f"ids are {tuple(ids.shape)} {ids.dtype}, scores {tuple(scores.shape)} {scores.dtype}; pass (rows, {k}) "
            "int32 and float32 alike"
        )
