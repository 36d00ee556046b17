# SPDX-License-Identifier: Apache-2.0
"""``select``: which protocol, grid and channel a call uses; a pure function of what is equal on all ranks.

Alignment, strides, aliasing and where a tensor lives never enter: they choose a local copy at most. All ranks use the
table that rank 0 read, and vote on its hash when a communicator is made; so the same call has the same plan everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from flycomm.dtypes import REDUCIBLE, REDUCTIONS
from flycomm.layout import Routes
from flycomm.tables import OPS, Row, carries

_REDUCIBLE = {entry.torch_name for entry in REDUCIBLE.values()}


@dataclass(frozen=True)
class Plan:
    """``protocol`` is one of ``tables.PROTOCOLS``, or "fallback", which has the reason in one sentence; of a call that
    may be one kernel also "separate", for one a step."""

    protocol: str
    row: Row | None = None
    reason: str = ""


def select(op: str, reduction: str, captured: bool, num_bytes: int, dtype: str, limit: int, routes: Routes) -> Plan:
    """The plan of a call of one of ``tables.OPS`` with ``num_bytes`` of ``dtype`` (a torch name without "torch.").

    ``num_bytes``: the message of an all-reduce, a rank's shard of a gather or scatter. ``reduction``: one of
    ``dtypes.REDUCTIONS``; "" for a gather. ``limit`` is the communicator's ``max_bytes``, ``routes`` its layout's.
    """
    if op != "all_gather" and reduction not in REDUCTIONS:
        return Plan(
            "fallback", reason=f"reduction {reduction!r} is not one of {', '.join(REDUCTIONS)}; use one of these"
        )
    if op != "all_gather" and dtype not in _REDUCIBLE:
        return Plan(
            "fallback", reason=f"dtype {dtype} is not one of {', '.join(sorted(_REDUCIBLE))}; convert the tensor"
        )
    if num_bytes > limit:
        return Plan("fallback", reason=f"{num_bytes} bytes are over max_bytes={limit}; pass a larger max_bytes to init")
    row = next(row for row in _rows(op, reduction, captured, routes) if row.largest is None or num_bytes <= row.largest)
    return Plan(row.protocol, row)


def _rows(op: str, reduction: str, captured: bool, routes: Routes) -> tuple[Row, ...]:
    """An operation's rows, or all-gather's where one of them could not carry the bit patterns of ``reduction``."""
    rows = routes[op, captured]
    if all(carries(row.protocol, op, reduction) for row in rows):
        return rows
    return routes[OPS[-1], captured]
