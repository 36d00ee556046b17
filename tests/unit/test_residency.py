# SPDX-License-Identifier: Apache-2.0
"""The budget of what may wait at the same time."""

from __future__ import annotations

import pytest

from flycomm.errors import ResidencyError
from flycomm.geometry import LARGEST_CLASS, SMALLEST_CLASS, Geometry, geometry
from flycomm.layout import plan_layout
from flycomm.residency import Residency
from flycomm.targets import Capabilities

H200 = Capabilities("H200", "sm_90", 32, 132, 1 << 37, 1_000_000_000, True)


def test_one_rank_a_device_may_wait_with_the_largest_grid_on_both_lanes():
    assert Residency.of(H200, 1, 1, 0).fits(geometry("cuda", LARGEST_CLASS))


def test_virtual_ranks_get_smaller_classes():
    four = Residency.of(H200, 4, 1, 0)
    layout = plan_layout("cuda", 8, 256 << 20, 1, True, fits=four.fits)
    assert SMALLEST_CLASS < layout.largest_class < LARGEST_CLASS
    assert four.fits(geometry("cuda", layout.largest_class))
    assert not four.fits(geometry("cuda", 2 * layout.largest_class))


def test_kernel_channels_count_and_refusals_have_the_numbers():
    assert not Residency.of(H200, 1, 1, 100).fits(Geometry(64, 512))
    Residency.of(H200, 1, 1, 100).check("cuda")
    with pytest.raises(ResidencyError, match=r"1000 blocks of kernel channels, want \d+ threads .* over the 135168 "):
        Residency.of(H200, 1, 1, 1000).check("cuda")
