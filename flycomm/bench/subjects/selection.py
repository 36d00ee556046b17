# SPDX-License-Identifier: Apache-2.0
"""Whether a selection is right whose scores a kernel has made, and rounded in its own way: in two steps.

1. Every score is, within a tolerance, what torch makes of that key; and no key that was left out is better than the
   worst that was taken by more than two tolerances.
2. Of flycomm's, scores, ids and counts are to the bit what one rank selects that scores everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flycomm.bench.reference import Verdict


@dataclass(frozen=True)
class Among:
    """All scores: f64 (lists, keys), -inf where a list may not take the key; and ``off``: f64 (lists,), tolerances."""

    scores: torch.Tensor
    off: torch.Tensor

    @property
    def seen(self) -> torch.Tensor:
        """(lists,) i64: how many keys a list may take."""
        return (self.scores != -torch.inf).sum(1)

    def within(self, keys: torch.Tensor) -> Among:
        """Only keys for which ``keys``, bool (keys,), is true may be taken."""
        return Among(self.scores.where(keys, -torch.inf), self.off)

    def forcing(self, keys: torch.Tensor) -> Among:
        """``keys``, i64 (lists, any number), have to be taken: their scores are +inf."""
        return Among(self.scores.scatter(1, keys, torch.inf), self.off)

    def lists(self, some: torch.Tensor) -> Among:
        """Of these lists alone: bool (lists,)."""
        return Among(self.scores[some], self.off[some])

    def judge(self, scores: torch.Tensor, ids: torch.Tensor) -> Verdict:
        """Of a selection (lists, k): whether these are the best of each list, none twice, and the better ones first."""
        ids = ids.long()
        keys = self.scores.shape[1]
        if not bool(((ids >= 0) & (ids < keys)).all()):
            return Verdict(False, float("inf"))
        want = self.scores.gather(1, ids)
        near, max_error = self._near(scores, want)
        left = self.scores.scatter(1, ids, -torch.inf).amax(1)
        best = bool((left <= want.amin(1) + 2 * self.off).all())
        distinct = bool((ids.sort(dim=1).values.diff(dim=1) > 0).all())
        in_order = bool((scores[:, 1:] <= scores[:, :-1]).all())
        return Verdict(near and best and distinct and in_order, max_error)

    def judge_all(self, scores: torch.Tensor) -> Verdict:
        """Of scores of all keys (lists, keys): whether each that its list sees is right."""
        return Verdict(*self._near(scores.where(self.scores != -torch.inf, -torch.inf), self.scores))

    def _near(self, scores: torch.Tensor, want: torch.Tensor) -> tuple[bool, float]:
        difference = torch.where(scores == want, 0.0, (scores - want).abs()).nan_to_num(nan=float("inf"))
        right = bool((difference <= self.off[:, None]).all())
        return right, float(difference.max()) if difference.numel() else 0.0


def same_bits(found: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """Tensors of 4 bytes an element."""
    pairs = zip(found, want, strict=True)
    return all(torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in pairs)
