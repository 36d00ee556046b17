# SPDX-License-Identifier: Apache-2.0
"""The mono feed-forward layer as AMD code: no scratch, weights on their way before a wait, one acquire a wait."""

from __future__ import annotations

from functools import cache

import isa_rules as rules
import pytest
from build import build, needs_linker

from flycomm.compile import ARCHES
from flycomm.kernels import Specialization
from flycomm.kernels import mono_ffn as kernel
from flycomm.kernels._mono_ffn_stages import Shape
from flycomm.kernels.mono_ffn import Layer
from flycomm.primitives.dot import GROUP
from flycomm.primitives.schedule import turns

pytestmark = needs_linker

# layer, world, blocks, threads
VARIANTS = [
    (Layer(6144, 1024, 2048, 1, "packets"), 2, 128, 256),
    (Layer(4096, 1024, 2048, 2, "flags"), 8, 128, 256),
    (Layer(512, 256, 256, 4, "packets"), 8, 16, 256),
    (Layer(512, 256, 256, 8, "flags"), 2, 16, 256),
    (Layer(256, 256, 64, 16, "packets"), 2, 8, 256),
]


@cache
def specialization(variant):
    layer, world, blocks, threads = variant
    return Specialization("mono", kernel.build(layer), world, "bf16", blocks, threads, 256)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v[0].hidden}-{v[0].protocol}-r{v[0].rows}-w{v[1]}")
def test_code(variant, arch):
    layer = variant[0]
    built = build(specialization(variant), arch)
    assert built.metadata[".private_segment_fixed_size"] == 0, "scratch memory"
    assert built.metadata[".vgpr_spill_count"] == 0
    assert rules.polls_keep_the_caches(built.function, built.accesses) == []
    assert rules.peer_memory_is_not_cached(built.accesses) == []
    acquired = [i for i, one in enumerate(built.function.instructions()) if one.invalidates()]
    assert len(acquired) == (2 if layer.protocol == "packets" else 3), "one for a wait"


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("variant", VARIANTS[:2], ids=lambda v: v[0].protocol)
def test_later_weights_are_loaded_before_the_wait(variant, arch):
    """With one turn a stage, what is loaded after the last wait is what was not loaded ahead."""
    layer, _, blocks, threads = variant
    shape = Shape(layer.hidden, layer.inter, layer.rows, blocks, threads, layer.out)
    assert turns(layer.tiles["projection"], blocks, shape.groups) == 1
    code = build(specialization(variant), arch).function.instructions()
    last = max(i for i, one in enumerate(code) if one.invalidates())
    steps = shape.fragments // GROUP
    loads = sum(one.opcode == "global_load_dwordx4" for one in code[last:])
    assert loads == steps * (layer.rows + 2) - shape.ahead
