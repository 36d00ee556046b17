# SPDX-License-Identifier: Apache-2.0
"""What a top-k must find, on the CPU, and whether it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flycomm.bench.reference import Verdict


def best(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` best of each row of ``scores`` (rows, columns), by score and then by the lower id: f32 scores and i32
    ids, (rows, k). No score is NaN. A selection among keys that are all distinct: it has one result."""
    wide = scores.float() + 0.0  # -0 is +0
    bits = wide.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = (ordered << 32) - torch.arange(scores.shape[1])
    ids = torch.topk(keys, k, dim=1).indices
    return wide.gather(1, ids), ids.int()


@dataclass(frozen=True)
class Best:
    """What one rank must give: ``scores`` and ``ids`` (rows, k), ``counts`` (rows,); and ``among`` what: all scores,
    whose ``values`` are the best (both f32)."""

    scores: torch.Tensor
    ids: torch.Tensor
    counts: torch.Tensor
    among: torch.Tensor
    values: torch.Tensor

    def judge(self, found: Sequence[torch.Tensor], exact: bool) -> Verdict:
        """``exact``: scores, ids and counts to the bit. Otherwise scores and ids of all rows' best, with any choice
        among equal scores."""
        scores, ids = found[0].cpu().float(), found[1].cpu().long()
        want = self.scores if exact else self.values
        difference = torch.where(scores == want, 0.0, (scores - want).abs()).nan_to_num(nan=float("inf"))
        max_error = float(difference.max()) if difference.numel() else 0.0
        if exact:
            same = torch.equal(ids, self.ids.long()) and torch.equal(found[2].cpu().long(), self.counts.long())
            return Verdict(same and torch.equal(scores.view(torch.int32), want.view(torch.int32)), max_error)
        inside = bool(((ids >= 0) & (ids < self.among.shape[1])).all())
        distinct = bool((ids.sort(dim=1).values.diff(dim=1) > 0).all())
        right = inside and distinct and torch.equal(self.among.gather(1, ids), want)
        return Verdict(right and torch.equal(scores, want), max_error)
