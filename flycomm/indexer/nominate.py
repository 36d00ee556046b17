# SPDX-License-Identifier: Apache-2.0
"""The best of one rank's scores, as an indexer's step needs them: outputs given, everything made ahead."""

from __future__ import annotations

from typing import Any

import torch

from flycomm.indexer.selection import TopK
from flycomm.kernels._topk_plan import plan
from flycomm.kernels.topk_local import specialization


class Nominate:
    """The ``k`` best of up to ``rows`` rows of ``columns`` f32 scores, by the kernel of ``torch.ops.flycomm.topk``.

    Rows begin at multiples of 16 bytes. Collective to make: compiles, loads and allocates a workspace, which calls use
    in turn.
    """

    def __init__(
        self,
        session: Any,  # Session: its room stands below this one
        rows: int,
        columns: int,
        k: int,
        by_score: bool,
        low: bool,
    ):
        chosen = plan(session.device.type == "cpu", max(1, columns), k)
        self.session, self.columns, self.k = session, columns, k
        self.kernel = session.load(specialization(chosen, "f32", by_score, low, True))
        self.workspace = torch.zeros(rows * chosen.row_bytes, dtype=torch.uint8, device=session.device)

    def __call__(self, scores: torch.Tensor, lengths: torch.Tensor, out: TopK) -> TopK:
        """One launch, into ``out``: ids are columns. ``lengths``: i32 (rows,); no score beyond is read."""
        rows = scores.shape[0]
        if rows:
            self.kernel(
                scores.data_ptr(),
                lengths.data_ptr(),
                *(one.data_ptr() for one in out),
                self.workspace.data_ptr(),
                rows,
                self.columns,
                scores.stride(0),
                self.k,
                self.session.stream(),
            )
            self.session.target.raise_pending()
        return out


def room_for(rows: int, k: int, device: torch.device) -> TopK:
    """Outputs, not filled."""
    ids = torch.empty((rows, k), dtype=torch.int32, device=device)
    return TopK(torch.empty_like(ids, dtype=torch.float32), ids, ids.new_empty(rows))
