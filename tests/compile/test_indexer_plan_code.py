# SPDX-License-Identifier: Apache-2.0
"""The plan of an indexer's step for AMD and NVIDIA GPUs: a few registers, no scratch and no shared memory."""

from __future__ import annotations

import flydsl.compiler as flyc
import pytest
from build import build, needs_linker

from flycomm import targets
from flycomm.compile import ARCHES
from flycomm.kernels.indexer_plan import specialization

FORMS = [(1, (0, 0), False), (4, (0, 1), True)]


@needs_linker
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("lists", "forced", "ragged"), FORMS)
def test_amd(arch, lists, forced, ragged):
    metadata = build(specialization(lists, forced, ragged), arch).metadata
    assert metadata[".private_segment_fixed_size"] == 0
    assert metadata[".vgpr_spill_count"] == 0
    assert metadata[".group_segment_fixed_size"] == 0


@pytest.mark.parametrize(("lists", "forced", "ragged"), FORMS)
def test_cuda(lists, forced, ragged):
    kernel = specialization(lists, forced, ragged)
    with targets.compiling_for("cuda", "sm_90"):
        flyc.compile(kernel.launcher(), *kernel.placeholders())
