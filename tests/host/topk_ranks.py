# SPDX-License-Identifier: Apache-2.0
"""Scores dealt out over ranks, and what every rank must get of their top-k: for tests of the exchange."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from flycomm.indexer.shard import ShardLayout
from flycomm.kernels._topk_exchange_plan import MAX_ROWS, k_class
from flycomm.ops.topk import topk_local
from flycomm.topk import topk_exchange
from tests import topk_oracle as oracle
from tests.ranks import DTYPES, resident_rows

_SLACK = 5  # columns that no row reaches


@dataclass(frozen=True)
class Case:
    """A call. ``keys``: of the whole sequence. ``granule`` 0: contiguous. ``given``: by way of a local top-k, whose
    results are ``shuffled`` or in order."""

    world: int = 2
    k: int = 16
    rows: int = 3
    keys: int = 300
    granule: int = 1
    kind: str = "levels"
    mode: str = "all"
    order: str = "score"
    tie_break: str = "low"
    dtype: str = "f32"
    lengths: str = "ragged"  # or "all", "zero", "first": those of rank 0, if granule is 0
    forced: tuple[int, int] = (0, 0)
    given: bool = False
    shuffled: bool = False
    wide: bool = True
    local_lengths: bool = False
    owners: tuple[int, ...] = ()
    algo: str = "auto"
    seed: int = 0

    @property
    def layout(self) -> ShardLayout:
        return ShardLayout(self.world, self.granule or max(1, -(-self.keys // self.world)))

    @property
    def options(self) -> dict[str, Any]:
        """Of ``tests.ranks.run``."""
        rows = 4 if self.world == 8 and self.rows <= 4 else 16  # eight virtual ranks may share a GPU
        rows = rows if self.rows <= 16 else MAX_ROWS[k_class(self.k)]
        rows = resident_rows(self.world, rows, self.k)
        if self.algo in ("push", "split") and rows < self.rows <= MAX_ROWS[k_class(self.k)]:
            pytest.skip(f"{self.world} ranks on these devices push {rows} rows at a time, not {self.rows}")
        return {"topk": (rows, self.k), "max_bytes": (8 if self.k <= 64 else 64) << 20}

    def visible(self) -> np.ndarray:
        """(rows,) global lengths."""
        if self.lengths == "zero":
            return np.zeros(self.rows, np.int64)
        if self.lengths == "first":
            return np.full(self.rows, self.keys // self.world)
        some = (self.keys, 0, 1, self.k - 1, self.k, self.k + 1, self.world * self.k + 1, self.world * self.k - 1)
        some = (*some, self.keys // 2 | 1, self.keys - 1)
        if self.lengths == "all":
            some = (self.keys,)
        return np.array([min(some[(row + self.seed) % len(some)], self.keys) for row in range(self.rows)])


def whole(case: Case) -> np.ndarray:
    """(rows, keys) scores of the whole sequence, of the case's dtype, as f32."""
    x = oracle.scores(case.kind, case.rows, max(1, case.keys), case.seed)[:, : case.keys]
    return torch.from_numpy(x).to(DTYPES[case.dtype]).float().numpy()


def keys_of(case: Case, rank: int) -> np.ndarray:
    """Global positions of what a rank keeps, in its order."""
    layout = case.layout
    count = layout.local_length(case.keys, rank)
    return np.array([layout.to_global(i, rank) for i in range(count)], np.int64)


def share(case: Case, rank: int, device: Any) -> torch.Tensor:
    """A rank's scores, with poison beyond each row's length and between rows."""
    x, visible = whole(case), case.visible()
    columns = case.layout.local_length(case.keys, 0) + _SLACK
    stride = -(-columns // 8) * 8 + (8 if case.wide else 3)
    room = np.resize(np.array([np.inf, np.nan, 3e38], np.float32), (case.rows, stride)).copy()
    mine = keys_of(case, rank)
    for row in range(case.rows):
        here = mine[mine < visible[row]]
        room[row, : here.size] = x[row, here]
    return torch.from_numpy(room).to(DTYPES[case.dtype]).to(device)[:, :columns]


def call(comm: Any, case: Case) -> tuple[np.ndarray, ...]:
    """This rank's call of a case; its scores, ids and counts."""
    layout, visible = case.layout, case.visible()
    lengths = torch.tensor(visible, dtype=torch.int32, device=comm.device)
    own = torch.tensor([layout.local_length(int(one), comm.rank) for one in visible], dtype=torch.int32)
    x = share(case, comm.rank, comm.device)
    options: dict[str, Any] = {"layout": layout, "mode": case.mode, "order": case.order, "tie_break": case.tie_break}
    options["algo"] = case.algo
    if case.owners:
        options["owners"] = torch.tensor(case.owners, dtype=torch.int32, device=comm.device)
    if case.given:
        best, ids, _ = topk_local(x, case.k, own.to(comm.device), "score", case.tie_break)
        if case.shuffled:
            places = np.random.default_rng(100 * comm.rank + case.seed).permutation(case.k)
            best, ids = (one[:, torch.from_numpy(places).to(comm.device)].contiguous() for one in (best, ids))
        found = topk_exchange(comm._session, best, case.k, ids=ids, **options)
    else:
        if case.local_lengths:
            lengths, options["local_lengths"] = own.to(comm.device), True
        found = topk_exchange(comm._session, x, case.k, lengths, forced=case.forced, **options)
    return tuple(one.cpu().numpy() for one in found)


def expected(case: Case, rank: int) -> tuple[np.ndarray, ...]:
    """What one rank with all scores finds, as far as ``rank`` gets it."""
    x, visible = whole(case).copy(), case.visible()
    for row, length in enumerate(visible):
        first, last = (min(one, length) for one in case.forced)
        x[row, :first] = np.inf
        x[row, length - last : length] = np.inf
    best, ids, counts = oracle.topk(x, case.k, visible, case.order, case.tie_break)
    for row in range(case.rows):
        if case.mode == "owner" and rank != (case.owners[row] if case.owners else row % case.world):
            ids[row], best[row], counts[row] = -1, -np.inf, 0
        if case.mode == "shard":
            own = np.array([one >= 0 and case.layout.to_local(int(one))[0] == rank for one in ids[row]])
            kept, scores = ids[row, own], best[row, own]
            ids[row], best[row], counts[row] = -1, -np.inf, kept.size
            ids[row, : kept.size], best[row, : kept.size] = kept, scores
    return best, ids, counts


def check(comm: Any, case: Case) -> tuple[np.ndarray, ...]:
    """:func:`call`, equal to the bit to what is :func:`expected`."""
    found = call(comm, case)
    for name, one, want in zip(("scores", "ids", "counts"), found, expected(case, comm.rank), strict=True):
        assert one.shape == want.shape
        assert np.array_equal(one.view(np.uint32), want.view(np.uint32)), (comm.rank, case, name, one, want)
    return found


def check_all(comm: Any, cases: list[Case]) -> None:
    for case in cases:
        check(comm, case)


def several(case: Case, count: int) -> list[Case]:
    """The case with several seeds, so that nothing left over from one call is right in the next."""
    return [replace(case, seed=case.seed + i) for i in range(count)]
