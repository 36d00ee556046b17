# SPDX-License-Identifier: Apache-2.0
"""Kernels that record what they do as AMD code: in registers, with a count for each record."""

from __future__ import annotations

import pytest
from build import build_launcher, needs_linker

from flycomm import kernels, targets
from flycomm.compile import ARCHES
from flycomm.geometry import Geometry
from flycomm.primitives import trace

pytestmark = needs_linker


QUICK = (("flags", "gfx942"), ("packets", "gfx950"))


@pytest.mark.parametrize(
    ("protocol", "arch"),
    [
        pytest.param(protocol, arch, marks=() if (protocol, arch) in QUICK else pytest.mark.full)
        for protocol in ("flags", "packets")
        for arch in ARCHES
    ],
)
def test_code(protocol, arch):
    with targets.compiling_for("rocm", arch):
        built = []
        for traced in (False, True):
            one = kernels.all_reduce(2, "bf16", Geometry(4, 256), protocol)
            with trace.compiled_in(traced):
                built.append(build_launcher(*one.build(one.world, one.dtype, one.blocks, one.threads), arch))
    plain, recording = built
    assert recording.metadata[".private_segment_fixed_size"] == 0, "scratch memory"
    assert recording.metadata[".vgpr_spill_count"] == 0
    texts = [[str(i) for i in one.function.instructions()] for one in built]
    atomics = [sum("atomic_add" in line for line in text) for text in texts]
    assert atomics[0] == 0
    assert atomics[1] >= 5, "a count for each record: call, post, take, and the ends"
    assert len(plain.data) < len(recording.data)
