# SPDX-License-Identifier: Apache-2.0
"""``IndexScores``: the scoring kernel as what :class:`flycomm.indexer.cp.IndexerCP` scores with."""

from __future__ import annotations

from typing import Any

import torch

from flycomm.errors import UsageError
from flycomm.geometry import Geometry
from flycomm.indexer.kinds import Indexer
from flycomm.indexer.plan import StepPlan
from flycomm.kernels import index_scores as kernel
from flycomm.primitives.index_score import BLOCK
from flycomm.primitives.index_score_keys import FORMATS, WIDTH
from flycomm.validate import check_tensor, whole

_ROWS = 4  # query rows of a request for which keys are read once
_SMALL, _SMALL_GROUPS = Geometry(4, 64), Geometry(4, 128)  # for a target whose threads are few
_ALIGNMENT = 16  # bytes
_FP8 = ("sm_90", "x86-64")  # chips that can sum as "fp8"; the host does in f32
_AUTO_FP8 = ("sm_90",)  # those of them where "auto" is "fp8"


def _math(asked: str, comm: Any, kind: str, format: str, heads: int) -> str:
    session = comm._session
    arch = session.target.capabilities(session.world.device).arch
    if asked == "fp8" and arch not in _FP8:
        raise UsageError(f"math='fp8' on {arch}; it is for {_FP8[0]}: pass 'f32' or 'auto'")
    if asked != "auto":
        return asked
    return "fp8" if arch in _AUTO_FP8 and kernel.sums_fp8(kind, format, heads) else "f32"


class IndexScores:
    """Scores one indexer's keys of one format, on one rank.

    ``comm``: the communicator; ``format``: of the cache, one of ``primitives.index_score_keys.FORMATS``; ``heads``:
    index heads; ``page``: tokens of a page; ``scale``: what a block-max score is multiplied by. In a page of the cache
    keys are ``token_stride`` bytes apart (default: side by side), and their scales, if the format has some, 4 bytes
    apart from byte ``scale_offset`` on (default: behind the keys). Collective: compiles and loads.

    ``math``: how products are summed. "f32": as f32; "fp8": by sm_90's e4m3 matrix units, which is for dsa of an e4m3fn
    cache and at most 128 heads; "auto": the one chosen for the chip. ``primitives.index_score.DEVIATION`` says how far
    scores may be off.
    """

    def __init__(
        self,
        comm: Any,  # Communicator: its room stands below this one
        indexer: Indexer,
        format: str,
        heads: int,
        page: int,
        *,
        scale: float = 1.0,
        token_stride: int | None = None,
        scale_offset: int | None = None,
        math: str = "auto",
    ):
        if not isinstance(indexer, Indexer) or not whole(heads, page) or min(heads, page) < 1:
            raise UsageError(
                f"{heads!r} heads of {indexer!r} and pages of {page!r} tokens; pass an Indexer and numbers over 0"
            )
        rows = min(_ROWS, kernel.most_rows(format, heads)) if format in FORMATS else 1
        asked = kernel.Scorer(indexer.kind, format, heads, page, rows, _math(math, comm, indexer.kind, format, heads))
        lists, block = (1, 1) if indexer.kind == "dsa" else (heads, BLOCK)
        if (indexer.lists, indexer.block) != (lists, block):
            raise UsageError(
                f"{indexer} has lists and blocks that {indexer.kind} of {heads} heads has not; use lists={lists} and "
                f"block={block}"
            )
        self.session, self.indexer, self.heads, self.scale = comm._session, indexer, heads, scale
        self.asked = asked
        self.dtype = getattr(torch, kernel.query_dtype(format))
        self.token_stride = FORMATS[format].key_bytes if token_stride is None else token_stride
        self.scale_offset = page * self.token_stride if scale_offset is None else scale_offset
        if not whole(self.token_stride, self.scale_offset) or self.token_stride % _ALIGNMENT or self.scale_offset % 4:
            raise UsageError(
                f"token_stride={self.token_stride} is not a multiple of {_ALIGNMENT} bytes, or scale_offset="
                f"{self.scale_offset} of 4; keep keys and scales of a page in planes of their own"
            )
        key_bytes, scaled = FORMATS[format].key_bytes, kernel.scales(indexer.kind, format) != "none"
        if self.token_stride < key_bytes:
            raise UsageError(
                f"token_stride={self.token_stride} is under the {key_bytes} bytes of a key; pass at least that"
            )
        self._page_bytes = max((page - 1) * self.token_stride + key_bytes, scaled * (self.scale_offset + 4 * page))
        grid = _SMALL
        if comm.device.type != "cpu":
            units = self.session.target.capabilities(self.session.world.device).compute_units
            grid = Geometry(units, kernel.best_threads(asked))
        elif asked.math == "fp8":
            grid = _SMALL_GROUPS
        self.kernel = self.session.load(kernel.specialization(asked, grid.blocks, grid.threads))

    def __call__(
        self,
        q: torch.Tensor,  # (rows, heads, 128), of the format's query type
        weights: torch.Tensor | None,  # (rows, heads) f32; None for block-max
        cache: torch.Tensor,  # (pages, …), a page's bytes side by side
        block_table: torch.Tensor,  # (requests, pages) i32
        plan: StepPlan,
        out: torch.Tensor,  # (lists, columns) f32
    ) -> None:
        """One launch on the current stream; may be captured. Raises :class:`UsageError` for what it cannot take."""
        addresses, numbers = self.given(q, weights, cache, block_table, plan, out)
        if plan.requests and plan.rows:
            self.kernel(*addresses, *numbers, self.session.stream())
            self.session.target.raise_pending()

    def given(
        self,
        q: torch.Tensor,
        weights: torch.Tensor | None,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        plan: StepPlan,
        out: torch.Tensor,
    ) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        """Of a call, what a kernel that scores gets: eight addresses and ten numbers. Raises :class:`UsageError`."""
        self._check(q, weights, cache, block_table, plan)
        tensors = (q, weights, cache, block_table, plan.first_row, plan.row_count, plan.share, out)
        return tuple(0 if one is None else one.data_ptr() for one in tensors), (
            plan.requests,
            block_table.stride(0),
            plan.page_first,
            plan.page_step,
            out.shape[1],
            cache.stride(0) * cache.element_size(),
            self.token_stride,
            self.scale_offset,
            out.stride(0),
            self.scale,
        )

    def _check(
        self,
        q: torch.Tensor,
        weights: torch.Tensor | None,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        plan: StepPlan,
    ) -> None:
        device = self.session.device
        for name, one in (("q", q), ("the cache", cache), ("the block table", block_table)):
            check_tensor(name, one)
        if plan.requests > kernel.MAX_REQUESTS:
            raise UsageError(f"{plan.requests} requests are over {kernel.MAX_REQUESTS}; make several steps")
        shape = (plan.rows, self.heads)
        given: list[tuple[str, torch.Tensor, tuple[int, ...], torch.dtype]] = [("q", q, (*shape, WIDTH), self.dtype)]
        if self.indexer.kind == "dsa":
            if weights is None:
                raise UsageError(f"weights are None, and dsa has some; pass {shape} float32")
            check_tensor("weights", weights)
            given.append(("weights", weights, shape, torch.float32))
        for name, one, wanted, dtype in given:
            if one.shape != wanted or one.dtype != dtype or one.device != device or not one.is_contiguous():
                raise UsageError(
                    f"{name} is {tuple(one.shape)} {one.dtype} on {one.device}; pass {wanted} {dtype} on {device}, "
                    "contiguous"
                )
        table = block_table
        if table.dtype != torch.int32 or table.dim() != 2 or table.stride(1) != 1 or table.device != device:
            raise UsageError(
                f"the block table is {tuple(table.shape)} {table.dtype} on {table.device}; pass (requests, pages) "
                f"int32 on {device}, rows contiguous"
            )
        page_bytes = cache.stride(0) * cache.element_size() if cache.dim() else 0
        if page_bytes < self._page_bytes and (not cache.dim() or cache.shape[0] > 1):
            raise UsageError(
                f"pages of the cache are {page_bytes} bytes apart, keys and scales of one take {self._page_bytes}; "
                "pass (pages, …), or the token_stride and scale_offset that it has"
            )
        if cache.device != device or (q.data_ptr() | cache.data_ptr() | page_bytes) % _ALIGNMENT:
            raise UsageError(
                f"queries, or pages {page_bytes} bytes apart on {cache.device}, do not begin at multiples of "
                f"{_ALIGNMENT} on {device}; align them"
            )
