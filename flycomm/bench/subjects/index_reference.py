# SPDX-License-Identifier: Apache-2.0
"""All scores of an indexer's step as torch makes them, in f64 by its own kernels on the device: the CPU takes too long
for 1 Mi tokens."""

from __future__ import annotations

import torch

from flycomm.bench.subjects.index_cache import CHUNK, GROUP, IndexInput
from flycomm.primitives.index_score_keys import FORMATS, WIDTH

_UE8M0_BIAS = 127


def all_scores(one: IndexInput) -> tuple[torch.Tensor, torch.Tensor]:
    """f64 (lists, keys): every score of the step, -inf where a list does not see the key; and (lists,): that no score
    can be beyond, in magnitude, by the norms of queries and keys."""
    shape = one.shape
    rows, block = shape.query_rows, shape.indexer.block
    seen = torch.arange(shape.context - rows + 1, shape.context + 1, device=one.q.device)  # tokens, of a request's rows
    scores, longest = [], []
    for request in range(shape.requests):
        own = slice(request * rows, (request + 1) * rows)
        q, weights = _double(one.q[own]), None if one.weights is None else one.weights[own].double()
        found, most = [], torch.zeros((), dtype=torch.float64, device=seen.device)
        for first in range(0, shape.pages, CHUNK):
            keys = _keys(one, request, first)
            most = torch.maximum(most, keys.norm(dim=1).max())
            dots = torch.einsum("rhd,td->rht", q, keys)  # a key's scale is positive: relu lets it through
            token = torch.arange(len(keys), device=seen.device) + first * shape.page
            inside = (token < seen[:, None])[:, None]
            if weights is not None:
                dots = torch.einsum("rh,rht->rt", weights, dots.relu_())[:, None]
            dots = torch.where(inside, dots if weights is not None else dots * shape.scale, -torch.inf)
            found.append(dots.unflatten(2, (-1, block)).amax(3).flatten(0, 1))
        scores.append(torch.cat(found, dim=1)[:, : -(-shape.context // block)])
        longest.append(most.expand(rows))
    norms = _double(one.q).norm(dim=2)
    norms = norms * shape.scale if one.weights is None else (norms * one.weights.double().abs()).sum(1, keepdim=True)
    return torch.cat(scores), (norms * torch.cat(longest)[:, None]).flatten()


def _keys(one: IndexInput, request: int, first: int) -> torch.Tensor:
    """f64 (tokens, 128), scaled: of up to ``CHUNK`` pages of a request, from page ``first`` on."""
    shape = one.shape
    pages = one.cache[one.tables[0][request, first : first + CHUNK].long()]
    end = shape.page * FORMATS[shape.format].key_bytes
    if shape.scales == "group":
        scales = torch.exp2(pages[:, end:].double() - _UE8M0_BIAS)
        return (_e2m1(pages[:, :end]).view(-1, GROUP) * scales.view(-1, 1)).view(-1, WIDTH)
    keys = _double(pages[:, :end].contiguous().view(shape.dtype)).view(-1, WIDTH)
    return keys * pages[:, end:].contiguous().view(torch.float32).view(-1, 1) if shape.scales == "token" else keys


def _e2m1(packed: torch.Tensor) -> torch.Tensor:
    """f64 values of two codes a byte, the one in the low bits first (OCP "Microscaling Formats", 2023)."""
    sizes = torch.tensor((0, 0.5, 1, 1.5, 2, 3, 4, 6), dtype=torch.float64, device=packed.device)
    values = torch.cat([sizes, -sizes])
    return values[torch.stack([packed & 0xF, packed >> 4], dim=-1).long()]


def _double(x: torch.Tensor) -> torch.Tensor:
    return x.float().double()
