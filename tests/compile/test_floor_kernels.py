# SPDX-License-Identifier: Apache-2.0
"""The kernels that the benchmark measures floors with compile for GPUs, and leave nothing to chance in their loops."""

from __future__ import annotations

import flydsl.compiler as flyc
import pytest
from build import build

from flycomm import targets
from flycomm.bench import floor_kernels, straggler

KERNELS = (floor_kernels.ping_pong(), floor_kernels.empty(8, 512), straggler.spin())


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_amd(kernel, arch):
    assert build(kernel, arch).metadata[".private_segment_fixed_size"] == 0


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_cuda(kernel):
    with targets.compiling_for("cuda", "sm_90"):
        flyc.compile(kernel.launcher(), *kernel.placeholders())
