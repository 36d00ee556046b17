# SPDX-License-Identifier: Apache-2.0
"""An indexer in torch and in NumPy: caches in shuffled pages, a scorer, and what every rank must get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from flycomm.indexer.cp import IndexerCP, owners_of
from flycomm.indexer.kinds import BLOCK_MAX, DSA, Indexer
from flycomm.indexer.plan import StepPlan
from flycomm.indexer.shard import ShardLayout
from tests import topk_oracle
from tests.ranks import resident_rows

TOKENS = replace(DSA, k=24)
BLOCKS = replace(BLOCK_MAX, k=3)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Case:
    """Steps of an indexer. ``granule`` 0: contiguous. ``queries``: rows of each request."""

    world: int = 2
    indexer: Indexer = TOKENS
    granule: int = 64
    page: int = 64
    cache: str = "sharded"
    mode: str = "all"
    order: str = "score"
    tie_break: str = "low"
    seq_lens: tuple[int, ...] = (300, 77, 0, 130)
    queries: tuple[int, ...] = (2, 1, 1, 4)
    padding: int = 2  # rows of no request
    most: int = 512  # tokens of a sequence
    parallel: bool | None = True
    topk_rows: int = 64  # lists that an exchange carries
    whole: bool = True  # scores are whole numbers, with many ties
    width: int = 4  # elements of a key
    heads: int = 4
    seed: int = 0

    @property
    def rows(self) -> int:
        return sum(self.queries) + self.padding

    @property
    def layout(self) -> ShardLayout:
        run = -(-self.most // (self.world * self.page)) * self.page
        return ShardLayout(self.world, self.granule or run)

    @property
    def options(self) -> dict[str, Any]:
        """Of ``tests.ranks.run``."""
        return self.beside(0)

    def beside(self, kernel_blocks: int) -> dict[str, Any]:
        """:attr:`options`, where kernel channels have so many blocks."""
        rows, k = self.topk_rows if self.indexer.k <= 64 else 16, self.indexer.k
        return {"topk": (resident_rows(self.world, rows, k, kernel_blocks), k), "max_bytes": 16 << 20}


def visible(case: Case) -> np.ndarray:
    """(rows,) tokens that each row sees."""
    found = [
        max(0, length - count + j + 1)
        for length, count in zip(case.seq_lens, case.queries, strict=True)
        for j in range(count)
    ]
    return np.array([*found, *[0] * case.padding])


def request_of_row(case: Case) -> np.ndarray:
    of = [i for i, count in enumerate(case.queries) for _ in range(count)]
    return np.array([*of, *[0] * case.padding])


@lru_cache(maxsize=8)
def _numbers(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries (rows, heads, width), weights (rows, heads) and keys (requests, most, width), f32."""
    rng = np.random.default_rng(case.seed)
    shapes = ((case.rows, case.heads, case.width), (case.rows, case.heads), (len(case.seq_lens), case.most, case.width))
    if case.whole:
        return tuple(rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes)  # type: ignore[return-value]
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)  # type: ignore[return-value]


def scores(case: Case) -> np.ndarray:
    """(rows × lists, keys) of the whole sequence, forced keys +inf, as one rank would have them."""
    q, weights, keys = _numbers(case)
    seen, k = visible(case), keys[request_of_row(case)]
    dots = np.zeros((case.rows, q.shape[1], case.most), np.float32)
    for i in range(case.width):
        dots += q[:, :, None, i] * k[:, None, :, i]
    if case.indexer.block == 1:
        found = np.zeros((case.rows, 1, case.most), np.float32)
        for head in range(q.shape[1]):
            found[:, 0] += weights[:, head, None] * np.maximum(dots[:, head], np.float32(0))
    else:
        dots = np.where(np.arange(case.most) < seen[:, None, None], dots, -np.inf)
        found = dots.reshape(*dots.shape[:2], -1, case.indexer.block).max(-1)
    found = found.reshape(case.rows * case.indexer.lists, -1)
    for row, count in enumerate(key_lengths(case)):
        first, last = (min(one, count) for one in case.indexer.forced)
        found[row, :first] = found[row, count - last : count] = np.inf
    return found


def key_lengths(case: Case) -> np.ndarray:
    """(rows × lists,) keys that each list sees."""
    return np.repeat(-(-visible(case) // case.indexer.block), case.indexer.lists)


def expected(case: Case, rank: int) -> tuple[np.ndarray, ...]:
    """Scores, ids and counts of one rank that scores everything, as far as ``rank`` gets them."""
    lengths = key_lengths(case)
    best, ids, counts = topk_oracle.topk(scores(case), case.indexer.k, lengths, case.order, case.tie_break)
    owners = owners_of(case.indexer, case.rows, case.world).numpy()
    keys = ShardLayout(case.world, case.layout.granule // case.indexer.block)
    for row in range(ids.shape[0]):
        if case.mode == "owner" and rank != owners[row]:
            ids[row], best[row], counts[row] = -1, -np.inf, 0
        if case.mode == "shard":
            own = np.array([one >= 0 and keys.to_local(int(one))[0] == rank for one in ids[row]])
            kept, values = ids[row, own], best[row, own]
            ids[row], best[row], counts[row] = -1, -np.inf, kept.size
            ids[row, : kept.size], best[row, : kept.size] = kept, values
    return best, ids, counts


def cache_of(case: Case, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Pages (pages, page, width) in shuffled places, poison where no token is, and a block table (requests, pages)."""
    _, _, keys = _numbers(case)
    rng = np.random.default_rng(1000 + case.seed + 7 * rank)
    layout = case.layout if case.cache == "sharded" else ShardLayout(1, case.page)
    mine = layout.local_length(case.most, 0)
    per_request = -(-mine // case.page)
    pages = np.full((len(case.seq_lens) * per_request + 3, case.page, case.width), np.nan, np.float32)
    table = rng.permutation(pages.shape[0])[: len(case.seq_lens) * per_request].reshape(-1, per_request)
    for request, length in enumerate(case.seq_lens):
        for local in range(layout.local_length(length, rank if case.cache == "sharded" else 0)):
            position = layout.to_global(local, rank if case.cache == "sharded" else 0)
            pages[table[request, local // case.page], local % case.page] = keys[request, position]
    return pages, table.astype(np.int32)


class TorchScorer:
    """Scores by torch operations alone, one product after the other: the same bits whoever computes them."""

    def __init__(self, indexer: Indexer, page: int):
        self.indexer = indexer
        self.page = page

    def __call__(self, q: Any, weights: Any, cache: Any, block_table: Any, plan: StepPlan, out: torch.Tensor) -> None:
        out.fill_(torch.inf)
        if not plan.rows or not plan.requests:
            return
        tokens = out.shape[1] * self.indexer.block
        entry = torch.arange(-(-tokens // self.page), device=out.device) * plan.page_step + plan.page_first
        table = block_table[:, entry.clamp_(max=block_table.shape[1] - 1)]
        keys = cache[table.long()].flatten(1, 2)[:, :tokens]
        k = keys[plan.request_of_row.long()]
        dots = torch.zeros(plan.rows, q.shape[1], tokens, device=out.device)
        for i in range(q.shape[2]):
            dots += q[:, :, None, i] * k[:, None, :, i]
        seen = torch.arange(tokens, device=out.device) < plan.share[:, None]
        if self.indexer.block == 1:
            found = torch.zeros(plan.rows, tokens, device=out.device)
            for head in range(q.shape[1]):
                found += weights[:, head, None] * dots[:, head].clamp_(min=0)
            out.copy_(torch.where(seen, found, torch.inf))
        else:
            dots = torch.where(seen[:, None], dots, -torch.inf)
            found = dots.unflatten(2, (-1, self.indexer.block)).amax(-1).flatten(0, 1)
            some = torch.arange(out.shape[1], device=out.device) < plan.share_lengths[:, None]
            out.copy_(torch.where(some, found, torch.inf))


def made(comm: Any, case: Case, scorer: Any = None) -> IndexerCP:
    indexer = IndexerCP(
        comm,
        case.indexer,
        case.layout,
        rows=case.rows,
        max_tokens=case.most,
        page=case.page,
        scorer=scorer or TorchScorer(case.indexer, case.page),
        cache=case.cache,
        mode=case.mode,
        order=case.order,
        tie_break=case.tie_break,
        parallel=case.parallel,
    )
    indexer.selector.scores.fill_(torch.inf)  # what nobody scores would win
    return indexer


def inputs(comm: Any, case: Case) -> dict[str, torch.Tensor]:
    """What a step's calls take, on the device."""
    q, weights, _ = _numbers(case)
    pages, table = cache_of(case, comm.rank)
    ends = np.concatenate([[0], np.cumsum(case.queries)]).astype(np.int32)
    lens = np.array(case.seq_lens, np.int32)
    given = {"q": q, "weights": weights, "cache": pages, "table": table, "seq_lens": lens, "ends": ends}
    return {name: torch.tensor(one, device=comm.device) for name, one in given.items()}


def packed(x: dict[str, torch.Tensor], format: str, scaled: bool = True) -> dict[str, torch.Tensor]:
    """Queries and pages as the scoring kernel takes them. Every key has a scale of its own, a power of two."""
    given = dict(x)
    pages = x["cache"]
    if format == "bf16":
        return given | {"q": x["q"].bfloat16(), "cache": pages.bfloat16().contiguous()}
    power = (pages[..., :9].nan_to_num().sum(-1).mul(5).round() % 3 - 1).int()  # a key's own, wherever it lies
    power = power if scaled else torch.zeros_like(power)
    raw = pages / torch.exp2(power)[..., None]
    if format == "e2m1":
        values = torch.tensor(_E2M1, device=pages.device)
        codes = (raw.abs()[..., None] == values).int().argmax(-1) | (raw < 0).int() << 3
        keys = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
        bad = raw.isnan().any(-1)
        scales = torch.where(bad, 255, power + 127).to(torch.uint8)[..., None].expand(*bad.shape, 4)
        return given | {"q": x["q"].bfloat16(), "cache": torch.cat([keys.flatten(1), scales.flatten(1)], 1)}
    dtype = getattr(torch, f"float8_{format}")
    keys = raw.to(dtype).view(torch.uint8)
    if not scaled:
        return given | {"q": x["q"].to(dtype), "cache": keys}
    scales = torch.exp2(power).float().view(torch.uint8)
    return given | {"q": x["q"].to(dtype), "cache": torch.cat([keys.flatten(1), scales.flatten(1)], 1)}


def call(indexer: IndexerCP, comm: Any, case: Case, packed: Any = None) -> tuple[np.ndarray, ...]:
    """One step: its plan and one decode; scores, ids and counts. ``packed`` makes of inputs what the scorer takes."""
    x = inputs(comm, case)
    x = packed(x) if packed else x
    uniform = len(set(case.queries)) == 1
    plan = indexer.plan(x["seq_lens"], case.queries[0] if uniform else x["ends"], case.rows)
    found = indexer.decode(x["q"], x["weights"], x["cache"], x["table"], plan)
    return tuple(one.cpu().numpy() for one in found)


def check(indexer: IndexerCP, comm: Any, case: Case, packed: Any = None) -> tuple[np.ndarray, ...]:
    """:func:`call`, equal to the bit to what is :func:`expected`."""
    found = call(indexer, comm, case, packed)
    for name, one, want in zip(("scores", "ids", "counts"), found, expected(case, comm.rank), strict=True):
        assert one.shape == want.shape, name
        assert np.array_equal(one.view(np.uint32), want.view(np.uint32)), (comm.rank, case, name, one, want)
    return found


def check_all(comm: Any, cases: Sequence[Case]) -> None:
    """Cases of one indexer, one after the other."""
    indexer = made(comm, cases[0])
    for case in cases:
        check(indexer, comm, case)


def several(case: Case, count: int) -> list[Case]:
    """The case with other numbers and other lengths, so that nothing left over is right."""
    rng = np.random.default_rng(case.seed)
    longest = [*case.seq_lens]
    found = [case]
    for seed in range(1, count):
        lens = tuple(int(rng.integers(0, one + 1)) for one in rng.permutation(longest))
        found.append(replace(case, seq_lens=lens, seed=case.seed + seed))
    return found
