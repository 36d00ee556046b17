# SPDX-License-Identifier: Apache-2.0
"""Which algorithm makes a top-k exchange: a pure function of what all ranks pass alike, and of their channels.

push     each rank pushes its best to whoever gets the row, who merges: one link latency
split    mode "all": a row's best go to one rank, which merges and pushes the result back: two latencies, and a rank is
         sent ``2 / world`` of the words
radix    the ranks find the threshold together, digit by digit: a latency a round, one to seven of them; any number of
         rows, and no more work or words with more ranks or a larger k
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flycomm.errors import UsageError
from flycomm.geometry import Geometry
from flycomm.kernels._topk_exchange_plan import (
    CLASSES,
    MAX_ROWS,
    RADIX,
    RADIX_BLOCKS,
    channel_name,
    k_class,
    list_class,
)
from flycomm.primitives.candidates import WORD_BYTES

ALGOS = ("auto", "push", "split", "radix")
SPLIT_SAVES = 768 << 10  # bytes into a rank that are worth a latency: modelled, 2 us at 386 GB/s
Lanes = Mapping[str, tuple[Geometry, int]]  # wire → grid and bytes of a source


class Choice(NamedTuple):
    algo: str  # one of ALGOS but "auto"
    wire: str
    grid: Geometry
    capacity: int


def choose(lanes: Lanes, algo: str, mode: str, rows: int, k: int, world: int) -> Choice:
    """The channel of a call and who uses it; raises :class:`UsageError` if these ``lanes`` have none for it.

    "auto" pushes as long as the channel has a block for every row, and beyond that takes "radix"; of pushes, "split"
    where it saves more of the wire than :data:`SPLIT_SAVES`. No measurement stands behind that yet.
    """
    if algo == "auto":
        pushes = rows <= lanes.get(channel_name(mode, k), (Geometry(0, 0), 0))[0].blocks
        algo = "radix" if not pushes else "split" if split_pays(mode, rows, k, world) else "push"
    if algo == "split" and (mode != "all" or k_class(k) == CLASSES[0]):
        raise UsageError(
            f"algo='split' of mode={mode!r} with k={k} is not mode='all' with a k over {CLASSES[0]}; use algo='push'"
        )
    wire = RADIX if algo == "radix" else channel_name("owner" if algo == "split" else mode, k)
    grid, capacity = lanes.get(wire, (Geometry(0, 0), 0))
    if algo == "radix" and list_class(capacity, max(1, grid.blocks)) < k_class(k):
        grid = Geometry(0, 0)
    if (grid.blocks if algo != "radix" else grid.blocks and rows) < rows:
        larger = algo == "radix" or rows <= MAX_ROWS[k_class(k)]  # would help
        other = algo != "radix" and (RADIX in lanes or not larger)
        remedies = [f"topk=({min(rows, RADIX_BLOCKS)}, {k}) to init"] * larger + ["algo='radix'"] * other
        raise UsageError(
            f"{rows} rows with k={k} are over the {grid.blocks} that this communicator has channels for; pass "
            f"{' or '.join(remedies)}"
        )
    return Choice(algo, wire, grid, capacity)


def split_pays(mode: str, rows: int, k: int, world: int) -> bool:
    """Whether what a rank is sent shrinks by more than another latency is worth.

    Pushed, a rank is sent ``rows * (world - 1)`` lists of the class of k; split, ``2 / world`` of these. The merge
    takes as long either way: it is a block a row, and all rows have one.
    """
    if mode != "all" or k_class(k) == CLASSES[0] or rows < world:
        return False
    pushed = rows * (world - 1) * k_class(k) * WORD_BYTES
    return pushed * (world - 2) // world > SPLIT_SAVES
