# SPDX-License-Identifier: Apache-2.0
"""``Indexer``: what an indexer keeps of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from flycomm.errors import UsageError
from flycomm.validate import whole


@dataclass(frozen=True)
class Indexer:
    """The best ``k`` keys of a sequence; a key is ``block`` tokens that have one score.

    ``kind`` names it in tables. ``lists``: selections that a query row makes: one, or one for each index head.
    ``forced``: the first and the last so many keys that a row sees are kept whatever their score.
    """

    kind: str
    k: int
    block: int = 1
    lists: int = 1
    forced: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if not isinstance(self.forced, tuple) or len(self.forced) != 2:
            raise UsageError(f"forced={self.forced!r} is not two numbers of keys; pass (first, last)")
        if not whole(self.k, self.block, self.lists, *self.forced):
            raise UsageError(f"{self} has what is no whole number; pass counts of keys, tokens and lists")
        if min(self.k, self.block, self.lists, *(1 + one for one in self.forced)) < 1 or sum(self.forced) > self.k:
            raise UsageError(
                f"an indexer of k={self.k} keys of {self.block} tokens, {self.lists} lists and forced={self.forced} "
                "keys is none; use at least 1 of each, and at most k forced"
            )


DSA = Indexer("dsa", 2048)  # DeepSeek V3.2, GLM-5: one selection of tokens
BLOCK_MAX = Indexer("block_max", 16, block=128, lists=4, forced=(0, 1))  # MiniMax-M3: blocks, for each index head
