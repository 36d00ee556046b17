# SPDX-License-Identifier: Apache-2.0
"""What the shipped tables do in one kernel: the rows of a decode step, in channels that are there anyway."""

from __future__ import annotations

import pytest

from flycomm import tables
from flycomm.geometry import Geometry
from flycomm.kernels.reduce_norm import slot_bytes
from flycomm.layout import key_of, plan_layout
from flycomm.start import DEFAULT_MAX_BYTES

NORM = tables.FUSED[0]


def most(arch: str, world: int, hidden: int, max_bytes: int = DEFAULT_MAX_BYTES) -> int:
    """Rows of bf16 up to which all go through one kernel."""
    routes = plan_layout(tables.shipped(arch), world, max_bytes, 1, arch != "host").routes[NORM, False]
    for rows in range(1, 1000):
        if not any(
            slot_bytes(rows, hidden, "bf16", row.blocks, row.threads) <= row.capacity
            and rows * hidden * 2 <= (row.largest or 0)
            for row in routes
        ):
            return rows - 1
    return 1000


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("world", range(1, 9))
def test_amd(arch, world):
    assert most(arch, world, 7168) == most(arch, world, 8192) == 64
    assert most(arch, world, 4096) == 128


@pytest.mark.parametrize(
    ("world", "of_4096", "of_7168"),
    [(1, 256, 128), (2, 256, 128), (3, 128, 64), (4, 128, 64), (5, 128, 16), (8, 32, 16)],
)
def test_nvidia(world, of_4096, of_7168):
    assert most("sm_90", world, 4096) == of_4096
    assert most("sm_90", world, 7168) == of_7168
    assert most("sm_90", world, 4096, 2 * DEFAULT_MAX_BYTES) >= 128


def test_a_budget_counts_the_registers_of_a_row():
    """Half as many of these threads are resident, so a grid of them takes twice its room."""
    table = tables.shipped("sm_90")
    row = next(row for row in table.rows if row.op == NORM and row.threads <= 256)
    assert row.counted == Geometry(row.blocks, 2 * row.threads)
    assert all(one.counted == one.geometry for one in table.rows if one.op != NORM or one.threads > 256)
    for room, there in ((2 * row.blocks * row.threads, True), (2 * row.blocks * row.threads - 1, False)):
        routes = plan_layout(
            table,
            row.worlds[0],
            DEFAULT_MAX_BYTES,
            1,
            True,
            fits=lambda grid, room=room: grid.blocks * grid.threads <= room,
        ).routes
        assert (routes[NORM, True] != ()) == there


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90"])
@pytest.mark.parametrize("world", range(1, 9))
def test_by_flags_it_shares_the_channel_of_the_collectives(arch, world):
    for max_bytes in (DEFAULT_MAX_BYTES // 4, DEFAULT_MAX_BYTES, 4 * DEFAULT_MAX_BYTES):
        routes = plan_layout(tables.shipped(arch), world, max_bytes, 1, True).routes
        others = {key_of(row, 0, True) for op in tables.OPS for row in routes[op, True]}
        ours = {key_of(row, 0, True) for row in routes[NORM, True] if row.protocol == "flags"}
        assert ours
        assert ours <= others, "also where there is too little memory for all that the table asks for"
        assert all((row.largest or 0) <= row.capacity for row in routes[NORM, True])
