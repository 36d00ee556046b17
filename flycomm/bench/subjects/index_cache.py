# SPDX-License-Identifier: Apache-2.0
"""What an indexer's step reads: queries, and a cache in shuffled pages. Made on the device, alike on every rank: 1 Mi
tokens take the CPU too long."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from flycomm.bench.problem import Case
from flycomm.errors import UsageError
from flycomm.indexer import BLOCK_MAX, DSA, Indexer
from flycomm.kernels.index_scores import query_dtype, scales
from flycomm.primitives.index_score_keys import FORMATS as KEYS
from flycomm.primitives.index_score_keys import WIDTH

FORMATS = tuple(KEYS)
KINDS = {"dsa": (DSA, 64, 64, "all"), "block_max": (BLOCK_MAX, 4, 128, "owner")}  # indexer, heads, page, mode
_SEED = 70_207
CHUNK = 512  # pages that are worked on at a time
GROUP = 32  # elements of a key under one scale, of a format that has scales a group
_SCALE_BYTES = 4  # of a token: an f32, or a ue8m0 for each group


@dataclass(frozen=True)
class Shape:
    """A step: ``requests`` of ``context`` tokens with ``query_rows`` rows each. Pages are a rank's granule too."""

    indexer: Indexer
    format: str  # of FORMATS
    heads: int
    page: int
    mode: str
    context: int
    requests: int
    query_rows: int

    @classmethod
    def of(cls, case: Case) -> Shape:
        """Raises :class:`UsageError` for what is no step, or selects more than its first row sees."""
        kind, format = case.kind or "", case.dtype
        for name, value, known in (("kind", kind, tuple(KINDS)), ("format", format, FORMATS)):
            if value not in known:
                raise UsageError(f"{name} {value!r} is not one of {', '.join(known)}; use these")
        indexer, heads, page, mode = KINDS[kind]
        heads = case.heads or heads
        indexer = replace(indexer, k=case.k or indexer.k, lists=heads if indexer.lists > 1 else 1)
        made = cls(indexer, format, heads, page, mode, case.context or 0, case.requests or 0, case.query_rows or 0)
        if made.context - made.query_rows + 1 < indexer.k * indexer.block:
            raise UsageError(
                f"a context of {made.context} tokens with {made.query_rows} query rows has not {indexer.k} keys of "
                f"{indexer.block} tokens for each of them; give a longer one, or a smaller k"
            )
        return made

    @property
    def rows(self) -> int:
        return self.requests * self.query_rows

    @property
    def lists(self) -> int:
        return self.rows * self.indexer.lists

    @property
    def scales(self) -> str:
        """What has a scale, behind the keys of its page: "none", a "token", or a "group" of its elements."""
        return scales(self.indexer.kind, self.format)

    @property
    def scale(self) -> float:
        """Of all scores of block-max."""
        return float(WIDTH**-0.5)

    @property
    def pages(self) -> int:
        """Of a request."""
        return -(-self.context // self.page)

    @property
    def page_bytes(self) -> int:
        return self.page * (KEYS[self.format].key_bytes + _SCALE_BYTES * (self.scales != "none"))

    def share_bytes(self, world: int) -> int:
        """What the rank with the largest share has to read of the cache."""
        return self.requests * -(-self.pages // world) * self.page_bytes

    @property
    def dtype(self) -> torch.dtype:
        """Of queries, and of keys that torch has a dtype for."""
        found: torch.dtype = getattr(torch, query_dtype(self.format))
        return found


class IndexInput(NamedTuple):
    shape: Shape
    q: torch.Tensor  # (rows, heads, 128)
    weights: torch.Tensor | None  # (rows, heads) f32, of dsa
    cache: torch.Tensor  # (pages, bytes) u8
    tables: tuple[torch.Tensor, ...]  # i32 (requests, pages) each: the same tokens in other pages of the cache


def make(shape: Shape, buffer: int, copies: int, device: torch.device) -> IndexInput:
    """Buffer number ``buffer``, the same on every rank, with every token ``copies`` times in the cache."""
    generator = torch.Generator(device).manual_seed(_SEED + buffer)
    q = torch.randn((shape.rows, shape.heads, WIDTH), generator=generator, device=device)
    weights = torch.randn((shape.rows, shape.heads), generator=generator, device=device)
    count = shape.requests * shape.pages
    places = torch.randperm(copies * count, generator=generator, device=device).view(copies, count)
    cache = torch.empty((copies * count, shape.page_bytes), dtype=torch.uint8, device=device)
    for first in range(0, count, CHUNK):
        pages = _pages(shape, min(CHUNK, count - first), generator)
        for copy in places:
            cache.index_copy_(0, copy[first : first + CHUNK], pages)
    tables = tuple(copy.view(shape.requests, shape.pages).int() for copy in places)
    return IndexInput(shape, q.to(shape.dtype), weights if shape.indexer.kind == "dsa" else None, cache, tables)


def _pages(shape: Shape, count: int, generator: torch.Generator) -> torch.Tensor:
    """(count, page_bytes) u8: normally distributed keys, then scales of 0.5 to 1.5; or codes of e2m1, each as likely as
    any other, then scales of 1/2, 1 and 2."""
    size, device = (count, shape.page), generator.device
    if shape.scales == "group":
        made: Any = {"generator": generator, "device": device, "dtype": torch.uint8}
        codes = torch.randint(256, (count, shape.page * KEYS[shape.format].key_bytes), **made)
        return torch.cat([codes, torch.randint(126, 129, (count, shape.page * _SCALE_BYTES), **made)], dim=1)
    keys = torch.randn((*size, WIDTH), generator=generator, device=device).to(shape.dtype)
    parts = [keys.view(torch.uint8).flatten(1)]
    if shape.scales == "token":
        parts.append((torch.rand(size, generator=generator, device=device) + 0.5).view(torch.uint8))
    return torch.cat(parts, dim=1)
