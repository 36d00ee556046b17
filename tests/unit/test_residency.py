# SPDX-License-Identifier: Apache-2.0
"""The budget of what may wait at the same time."""

from __future__ import annotations

import pytest

from flycomm.errors import ResidencyError
from flycomm.geometry import EARLY_THREADS, Geometry
from flycomm.kernels._topk_exchange_plan import as_counted, lane_channels
from flycomm.layout import plan_layout
from flycomm.residency import Residency
from flycomm.tables import OPS, shipped
from flycomm.targets import Capabilities

TABLE = shipped("sm_90")
H200 = Capabilities("H200", "sm_90", 32, 132, 1 << 37, 1_000_000_000, True)


def test_one_rank_a_device_may_wait_with_the_largest_grid_on_both_lanes():
    fits = Residency.of(H200, 1, 1, 0).fits
    assert all(fits(row.geometry) for row in TABLE.rows)


def test_kernels_start_early_where_every_lane_has_room_for_two():
    assert Residency.of(H200, 1, 1, 36).starts_early()
    assert not Residency.of(H200, 1, 1, 37).starts_early(), "a mono layer's blocks take what it needs"
    assert not Residency.of(H200, 1, 2, 0).starts_early(), "four lanes"
    assert not Residency.of(H200, 2, 1, 0).starts_early(), "ranks that share the device"
    small = [row.geometry for row in TABLE.rows if row.geometry.blocks * row.geometry.threads <= EARLY_THREADS]
    assert max(row.largest or 0 for row in TABLE.rows if row.geometry in small) >= 128 << 10


def test_virtual_ranks_get_smaller_grids():
    four = Residency.of(H200, 4, 1, 0)
    routes = plan_layout(TABLE, 8, 256 << 20, 1, True, fits=four.fits).routes
    every = [row for rows in routes.values() for row in rows]
    assert all(four.fits(row.geometry) for row in every)
    assert not all(four.fits(row.geometry) for row in TABLE.rows)
    longest = {rows[-1].protocol for (op, _), rows in routes.items() if op in OPS}
    assert longest == {"flags"}, "what is longer goes in pieces"


def test_kernel_channels_count_and_refusals_have_the_numbers():
    assert not Residency.of(H200, 1, 1, 100).fits(Geometry(64, 512))
    Residency.of(H200, 1, 1, 100).check(TABLE)
    with pytest.raises(ResidencyError, match=r"1000 blocks of kernel channels, want \d+ threads .* over the 135168 "):
        Residency.of(H200, 1, 1, 1000).check(TABLE)


def test_the_rows_of_a_topk_count_as_what_their_kernels_are_compiled_for():
    """A compute unit holds one block of 512 threads, or two of 256: 128 registers a thread."""
    grids = {name: as_counted(grid) for name, (grid, _) in lane_channels(False, 64, 2048).items()}
    assert grids["topk_64"] == Geometry(64, 1024)
    assert grids["topk_512"] == Geometry(16, 512)
    assert grids["topk_2048"] == Geometry(16, 1024)
    Residency.of(H200, 1, 1, 0).check_all(grids.values())
    with pytest.raises(ResidencyError, match=r"2 rank\(s\) .* 2 lane\(s\) of 64 blocks .* fewer rows in topk="):
        Residency.of(H200, 2, 1, 0).check_all(grids.values())
