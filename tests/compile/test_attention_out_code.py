# SPDX-License-Identifier: Apache-2.0
"""The mono layer behind attention as AMD code: no scratch, no router weight loaded after a wait, one acquire a wait."""

from __future__ import annotations

import isa_rules as rules
import pytest
from build import build, needs_linker

from flycomm.compile import ARCHES
from flycomm.kernels import Specialization
from flycomm.kernels import mono_attention_out as kernel
from flycomm.kernels._mono_router_stages import SLICES
from flycomm.kernels.mono_attention_out import Layer
from flycomm.primitives.dot import GROUP
from flycomm.primitives.schedule import turns

pytestmark = needs_linker

# layer, world, blocks, threads
VARIANTS = [
    (Layer(1024, 256, 32, 8, 1, "bf16", "sigmoid", True), 2, 16, 256),
    pytest.param((Layer(6144, 1024, 256, 8, 1, "bf16", "sigmoid", True), 2, 128, 256), marks=pytest.mark.full),
    pytest.param((Layer(7168, 2048, 256, 8, 2, "f32", protocol="flags"), 8, 128, 256), marks=pytest.mark.full),
    pytest.param((Layer(256, 256, 512, 16, 16, "f32", math="dot"), 8, 16, 256), marks=pytest.mark.full),
]
MATRIX = [
    (Layer(1024, 256, 64, 8, 16), 2, 16, 256),
    pytest.param((Layer(6144, 1024, 256, 8, 16), 2, 128, 256), marks=pytest.mark.full),
    pytest.param((Layer(7168, 2048, 256, 8, 48, "f32", "sigmoid", True), 8, 128, 256), marks=pytest.mark.full),
]


def _name(variant):
    layer = variant[0]
    return f"{layer.hidden}-{layer.experts}-{layer.protocol}-r{layer.rows}"


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("variant", MATRIX, ids=_name)
def test_many_rows_by_matrix_instructions(variant, arch):
    layer, world, blocks, threads = variant
    built = build(Specialization("mono", kernel.build(layer), world, "bf16", blocks, threads, 256), arch)
    assert built.metadata[".private_segment_fixed_size"] == 0, "scratch memory"
    assert built.metadata[".vgpr_spill_count"] == 0
    assert rules.polls_keep_the_caches(built.function, built.accesses) == []
    assert rules.peer_memory_is_not_cached(built.accesses) == []
    assert {one.opcode for one in built.function.instructions() if "mfma" in one.opcode} == {"v_mfma_f32_16x16x16_bf16"}


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("variant", VARIANTS, ids=_name)
def test_code(variant, arch):
    layer, world, blocks, threads = variant
    built = build(Specialization("mono", kernel.build(layer), world, "bf16", blocks, threads, 256), arch)
    assert built.metadata[".private_segment_fixed_size"] == 0, "scratch memory"
    assert built.metadata[".vgpr_spill_count"] == 0
    assert rules.polls_keep_the_caches(built.function, built.accesses) == []
    assert rules.peer_memory_is_not_cached(built.accesses) == []
    code = built.function.instructions()
    acquired = [i for i, one in enumerate(code) if one.invalidates()]
    assert len(acquired) == (2 if layer.protocol == "packets" else 3), "one for a wait"

    if layer.rows > 2 or turns(layer.tiles["router"], blocks, threads // GROUP) > 1:
        return  # not all of a lane's weights are on their way at the wait
    routing = code[acquired[-2] : acquired[-1]]
    loads = sum(one.opcode == "global_load_dwordx4" for one in routing)
    fragments = layer.hidden // SLICES // GROUP // (8 if layer.router == "bf16" else 4)
    assert loads == fragments * layer.rows, "token rows, and no weights"
