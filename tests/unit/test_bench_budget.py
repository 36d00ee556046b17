# SPDX-License-Identifier: Apache-2.0
"""A benchmark's communicator has the channels that its table means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flycomm import tables, targets
from flycomm.bench.budget import budget
from flycomm.bench.collective import Collective
from flycomm.kernels._topk_exchange_plan import lane_channels
from flycomm.kernels.reduce_norm import slot_bytes
from flycomm.layout import plan_layout


def _ranks(world: int) -> Any:
    """Rank 0, and others that say the same."""
    return SimpleNamespace(
        size=world, rank=0, device=0, agree=lambda *_: None, vote=lambda *_: [], exchange=lambda data: [data] * world
    )


@pytest.mark.parametrize("what", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize("largest", [2048, 100_000, 4 << 20, 20 << 20])
def test_the_budget_gives_every_message_the_channel_of_its_row(what, world, largest):
    target = targets.get("host")
    num_bytes = budget(target, _ranks(world), Collective.of(what, None), False, [2048, largest])
    assert num_bytes >= largest
    table = tables.load(target.capabilities(0).arch)
    meant = next(row for row in table.of(what, world, False) if row.largest is None or largest <= row.largest)
    given = plan_layout(table, world, num_bytes, 1, False).routes[what, False]
    assert meant.capacity in [row.capacity for row in given if row.largest is None or largest <= row.largest]


@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (16, 7168)])
def test_a_norm_gets_the_row_of_the_fused_kernel(world, rows, hidden):
    target = targets.get("host")
    table = tables.load(target.capabilities(0).arch)
    num_bytes = budget(target, _ranks(world), Collective.of("all_reduce_norm", None), False, [rows * hidden * 2])
    fused = plan_layout(table, world, num_bytes, 1, False).routes["all_reduce_norm", False]
    assert fused == table.of("all_reduce_norm", world, False)
    assert slot_bytes(rows, hidden, "bf16", fused[0].blocks, fused[0].threads) <= fused[0].capacity


@pytest.mark.parametrize("world", [1, 2, 8])
def test_an_exchange_gets_its_channels(world):
    target, topk = targets.get("host"), (16, 2048)
    num_bytes = budget(target, _ranks(world), Collective.of("topk_exchange", None), False, [], topk)
    table = tables.load(target.capabilities(0).arch)
    layout = plan_layout(table, world, num_bytes, 1, False, lane_channels=lane_channels(True, *topk))
    assert {key.wire for key in (slot.key for slot in layout.slots)} >= {"topk_64", "topk_owner_2048"}


def test_a_topk_of_one_device_asks_for_nothing():
    target = targets.get("host")
    assert budget(target, _ranks(1), Collective.of("topk", None), False, []) == 1 << 20
