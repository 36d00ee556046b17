# SPDX-License-Identifier: Apache-2.0
"""No warp overwrites what another still reads of a block's scan: the selections whose bound may have to be refined."""

from __future__ import annotations

import pytest
from ptx_barriers import arrays, unordered

from flycomm import targets
from flycomm.compile import _lowered
from flycomm.kernels import topk_exchange, topk_local
from flycomm.kernels._topk_exchange_plan import MAX_ROWS, plan
from flycomm.kernels._topk_plan import plan as local_plan

_TOTALS = 256  # bytes: block_scan.Scratch.totals


def _exchange():
    chosen = plan(False, 2048, 64)
    fixed = ("owner", "scores", chosen.columns, chosen.k, True, True, True, False)
    return topk_exchange.specialization(*fixed, 2, "f32", MAX_ROWS[chosen.k], chosen.threads)


def _local():
    return topk_local.specialization(local_plan(False, 2048, 64), "f32", True, True, True)


def _split():
    return topk_local.specialization(local_plan(False, 1 << 20, 2048), "f32", True, True, True)


@pytest.mark.parametrize("made", [_exchange, _local, _split], ids=["exchange", "local", "split"])
def test_barriers_part_the_uses_of_a_scan(made):
    one = made()
    with targets.compiling_for("cuda", "sm_90"):
        (image,) = _lowered.lower(one.launcher(), one.placeholders()).binaries.values()
    text = image.decode()
    (totals,) = arrays(text, _TOTALS)
    assert unordered(text, totals) == []
    assert unordered(text.replace("bar.sync", "nothing"), totals)  # what finding nothing would look like
