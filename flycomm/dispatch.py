# SPDX-License-Identifier: Apache-2.0
"""``select``: which protocol and channel a call uses; a pure function of what is equal on all ranks.

Alignment, strides, aliasing and where a tensor lives never enter: they choose a local copy at most. All ranks vote on
:func:`table_hash` when a communicator is made, so the same call gives the same plan everywhere.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from flycomm.channel import MAX_WORLD
from flycomm.dtypes import REDUCIBLE
from flycomm.geometry import TABLES, entry, size_class


@dataclass(frozen=True)
class Plan:
    """``protocol`` is one of ``geometry.PROTOCOLS``, or "fallback", which has the reason in one sentence."""

    protocol: str
    class_bytes: int = 0  # size class whose channel carries the call
    pieces: int = 0  # launches that the message needs, one after the other
    reason: str = ""


def select(
    op: str,
    reduction: str,
    target: str,
    world: int,
    num_bytes: int,
    dtype: str,
    limit: int,
    largest: int,
    protocol: str = "auto",
) -> Plan:
    """The plan of a call that moves ``num_bytes`` of ``dtype`` (a torch name without "torch.").

    ``limit`` is the communicator's ``max_bytes``, ``largest`` the largest size class that it made channels for,
    ``protocol`` what it was told to use, or "auto" for the table's choice.
    """
    if op == "all_reduce" and reduction != "sum":
        return Plan("fallback", reason=f"reduction {reduction!r} is not implemented; use 'sum'")
    names = {entry.torch_name for entry in REDUCIBLE.values()}
    if op == "all_reduce" and dtype not in names:
        return Plan("fallback", reason=f"dtype {dtype} is not one of {', '.join(sorted(names))}; convert the tensor")
    if num_bytes > limit:
        return Plan("fallback", reason=f"{num_bytes} bytes are over max_bytes={limit}; pass a larger max_bytes to init")
    if not 1 <= world <= MAX_WORLD:
        return Plan("fallback", reason=f"a world of {world} ranks is not in 1..{MAX_WORLD}; use a smaller group")
    class_bytes = min(size_class(num_bytes), largest)
    chosen = entry(target, class_bytes).protocol if protocol == "auto" else protocol
    return Plan(chosen, class_bytes, -(-num_bytes // class_bytes))


def table_hash(target: str) -> bytes:
    """Of everything on this target that ranks must have alike for :func:`select` to agree: 32 bytes."""
    return hashlib.sha256(json.dumps([target, [asdict(entry) for entry in TABLES[target]]]).encode()).digest()
