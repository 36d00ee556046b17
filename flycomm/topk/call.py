# SPDX-License-Identifier: Apache-2.0
"""The call of a top-k over scores that are spread over the ranks: outputs, a channel, a kernel, a launch."""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any

import torch

from flycomm.indexer.selection import TopK
from flycomm.indexer.shard import ShardLayout
from flycomm.kernels import Specialization
from flycomm.kernels import topk_exchange as push
from flycomm.kernels import topk_radix as radix
from flycomm.kernels._topk_exchange_plan import list_class, plan, radix_plan
from flycomm.layout import Key
from flycomm.session import Session
from flycomm.topk.checks import DTYPES, ORDERS, TIE_BREAKS, check
from flycomm.topk.choice import Choice, choose

_ALIGNMENT = 16  # bytes
_ANY = 1 << 24  # columns: more than any block's registers hold


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
    algo: str = "auto",
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
    ``ids`` their local positions, -1 for none; ``lengths`` are not used. A row's own best are one block's work: of rows
    of over some 10 000 scores :func:`flycomm.ops.topk.topk_local`, with several blocks a row, finds them sooner.

    ``mode``: "all" gives every rank every row; "shard" gives a rank those of the best that are its own; "owner" gives
    row ``r`` to rank ``r % world``, or ``owners[r]`` (alike on all ranks), and padding to the others. ``algo``: one of
    ``choice.ALGOS``, of the same result; "auto" pushes unless there are more rows than ``init(topk=…)`` was told.

    One launch on the current stream; may be captured, and replayed with other scores, lengths and owners. All ranks
    make the call, also with no keys, with the same arguments but for the scores (of any number of columns, anywhere in
    memory) and local lengths: how a rank reads its own scores does not show on the wire.
    """
    session.enter()
    world = session.world.size
    layout = layout or ShardLayout(world)
    rows, columns = check(
        session, scores, k, lengths, layout, mode, order, tie_break, ids, owners, forced, local_lengths, algo
    )
    out = torch.empty((rows, k), dtype=torch.int32, device=scores.device)
    best, counts = torch.empty_like(out, dtype=torch.float32), out.new_empty(rows)
    if rows == 0:
        return TopK(best, out, counts)
    session.roll_call("topk_exchange", f"{mode} {k} {order} {tie_break} {forced} {algo}", (rows,), str(layout))
    choice = choose(session.lane_channels, algo, mode, rows, k, world)
    captured, stream = session.is_capturing(), session.stream()
    peers = session.peers(Key(channel, captured, choice.wire, choice.grid, choice.capacity))
    session.claim(channel, captured, stream)
    wide = scores.data_ptr() % _ALIGNMENT == 0 and scores.stride(0) * scores.element_size() % _ALIGNMENT == 0
    cpu = session.device.type == "cpu"
    fixed = (order == ORDERS[0], tie_break == TIE_BREAKS[0])
    agreed = (choice, mode, k, *fixed, ids is not None, any(forced), scores.dtype)
    wanted = _kernel(cpu, world, *agreed, columns, wide)
    handle = session.load_one(agreed, wanted, lambda: _kernel(cpu, world, *agreed, _ANY, False))
    addresses = [0 if one is None else one.data_ptr() for one in (scores, ids, lengths, owners)]
    handle(
        peers,
        _tag(choice.algo, mode, k, rows, layout, order, tie_break, forced),
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
        *([min(rows, choice.grid.blocks)] if choice.algo == "radix" else []),
        stream,
    )
    session.target.raise_pending()
    return TopK(best, out, counts)


@lru_cache(maxsize=4096)
def _kernel(
    cpu: bool,
    world: int,
    choice: Choice,
    mode: str,
    k: int,
    by_score: bool,
    low: bool,
    given: bool,
    forced: bool,
    dtype: torch.dtype,
    columns: int,
    wide: bool,
) -> Specialization:
    """``columns`` and ``wide`` are this rank's own; they choose how it reads its scores, and nothing that peers see."""
    radical = choice.algo == "radix"
    chosen = (radix_plan if radical else plan)(cpu, columns, k)
    source, of = push.SOURCES[given], 0 if given else chosen.columns
    rest = (by_score, low, wide or given, forced, world, DTYPES[dtype], choice.grid.blocks, chosen.threads)
    if radical:
        return radix.specialization(mode, source, of, chosen.k, list_class(choice.capacity, choice.grid.blocks), *rest)
    return push.specialization("split" if choice.algo == "split" else mode, source, of, chosen.k, *rest)


@lru_cache(maxsize=4096)
def _tag(*values: Any) -> int:
    """31 bits that peers compare: what a call must have alike on all ranks."""
    return zlib.crc32(repr(values).encode()) & 0x7FFFFFFF
