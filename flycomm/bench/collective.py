# SPDX-License-Identifier: Apache-2.0
"""Which collective a run measures, and what its result must be. ``--bytes`` is always one rank's share:

============== ================================= ============================== ===================================
collective     input of a rank (elements)        result of a rank               checked
============== ================================= ============================== ===================================
all_reduce     ``n``                             ``n``: all inputs, reduced      f32 in rank order, to the bit
all_gather     ``n``                             ``world * n``: all, in order    to the bit, baselines too
reduce_scatter ``world * n``: ``n`` for each     ``n``: the own part, reduced    f32 in rank order, to the bit
============== ================================= ============================== ===================================

What is measured beside these (``subjects``) has a name here too, and a problem of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flycomm.bench.reference import error_bound, reduce_in_rank_order
from flycomm.dtypes import REDUCTIONS
from flycomm.errors import UsageError

NAMES = ("all_reduce", "all_gather", "reduce_scatter")
SHARE = {"all_reduce": "message", "all_gather": "shard", "reduce_scatter": "shard"}  # what ``bytes`` is the size of
SHARE |= {"all_reduce_norm": "message", "topk": "scores", "topk_exchange": "scores", "mono_ffn": "message"}
SHARE |= {"moe_finalize_norm": "message", "indexer": "cache"}


@dataclass(frozen=True)
class Collective:
    """``name`` is a key of :data:`SHARE`, ``reduction`` one of ``dtypes.REDUCTIONS``, or None where there is no choice.

    Sizes and expectations are of :data:`NAMES` only."""

    name: str
    reduction: str | None

    @classmethod
    def of(cls, name: str, reduction: str | None) -> Collective:
        """Validated; None means what is usual: "sum" where something is reduced."""
        if name not in ("all_reduce", "reduce_scatter"):
            if reduction is not None:
                raise UsageError(f"--reduction {reduction} means nothing to {name}; leave it out")
            return cls(name, None)
        if reduction not in (None, *REDUCTIONS):
            raise UsageError(f"--reduction {reduction} is not one of {', '.join(REDUCTIONS)}; use one of these")
        return cls(name, reduction or "sum")

    def input_numel(self, share: int, world: int) -> int:
        """Elements of a rank's input where its share is ``share`` elements."""
        return share * world if self.name == "reduce_scatter" else share

    def output_numel(self, share: int, world: int) -> int:
        return share * world if self.name == "all_gather" else share

    def empty_output(self, x: torch.Tensor, world: int) -> torch.Tensor:
        """Room for the result of the 1-D input ``x``."""
        share = x.numel() // world if self.name == "reduce_scatter" else x.numel()
        return torch.empty(self.output_numel(share, world), dtype=x.dtype, device=x.device)

    def expected(self, inputs: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
        """The result on ``rank`` of ``inputs``, one 1-D CPU tensor a rank."""
        terms = self._terms(inputs, rank)
        return torch.cat(terms) if self.reduction is None else reduce_in_rank_order(terms, self.reduction)

    def bound(self, inputs: Sequence[torch.Tensor], rank: int) -> torch.Tensor | None:
        """How far a result made in another order may be from :meth:`expected`, elementwise; None: not at all."""
        return None if self.reduction is None else error_bound(self._terms(inputs, rank), self.reduction)

    def _terms(self, inputs: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
        return [one.chunk(len(inputs))[rank] for one in inputs] if self.name == "reduce_scatter" else list(inputs)
