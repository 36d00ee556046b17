# SPDX-License-Identifier: Apache-2.0
"""``ShardLayout``: which rank scores which key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flycomm.errors import UsageError
from flycomm.primitives import shard
from flycomm.validate import whole

_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class ShardLayout:
    """Keys (tokens or blocks) dealt out over ``world`` ranks, ``granule`` of them at a time, in turn.

    Rank ``r`` keeps the keys ``r * granule`` to ``(r + 1) * granule``, then the granule ``world`` further on, and so
    on: its local order is the global one, so a local rule for ties is globally right. :meth:`contiguous` gives every
    rank one run; then the last rank has nothing to do while a context is short. Positions are Python ints or FlyDSL
    integers.
    """

    world: int  # ranks
    granule: int = 1  # keys

    def __post_init__(self) -> None:
        if not whole(self.world, self.granule):
            raise UsageError(f"{self} has what is no whole number; pass a number of ranks and of keys")
        if self.world < 1 or self.granule < 1:
            raise UsageError(f"a layout over {self.world} ranks by {self.granule} keys is empty; both are at least 1")
        if self.world * self.granule > _LARGEST:
            raise UsageError(
                f"{self.world} ranks by {self.granule} keys are over {_LARGEST} a round, as positions have "
                "32 bits; use a smaller granule"
            )

    @classmethod
    def contiguous(cls, world: int, capacity: int) -> ShardLayout:
        """Rank ``r`` keeps the ``capacity`` keys from ``r * capacity`` on."""
        return cls(world, capacity)

    def to_global(self, local: Any, rank: Any) -> Any:
        """The global position of rank ``rank``'s position ``local``."""
        return shard.global_of(local, rank, self.world, self.granule)

    def to_local(self, position: Any) -> tuple[Any, Any]:
        """The rank that keeps a global position, and where."""
        rank = shard.rank_of_position(position, self.world, self.granule)
        return rank, shard.local_of(position, self.world, self.granule)

    def local_length(self, length: Any, rank: Any) -> Any:
        """How many of the first ``length`` keys rank ``rank`` keeps."""
        return shard.local_length(length, rank, self.world, self.granule)

    def end(self, columns: int) -> int:
        """Where the global positions end if every rank keeps at most ``columns`` keys."""
        return self.to_global(columns - 1, self.world - 1) + 1 if columns else 0
