# SPDX-License-Identifier: Apache-2.0
"""The mono feed-forward layer as AMD code and PTX: no scratch, weights on their way before a wait, one acquire a wait;
matrix instructions for many rows.
"""

from __future__ import annotations

from functools import cache

import isa_rules as rules
import pytest
from build import build, needs_linker
from test_ptx import assemble, instructions, needs_ptxas

from flycomm import targets
from flycomm.compile import ARCHES, _lowered
from flycomm.kernels import Specialization
from flycomm.kernels import mono_ffn as kernel
from flycomm.kernels._mono_ffn_stages import Shape
from flycomm.kernels.mono_ffn import Layer
from flycomm.primitives.block_product import window_of
from flycomm.primitives.dot import GROUP
from flycomm.primitives.schedule import turns

# layer, world, blocks, threads
VARIANTS = [
    (Layer(6144, 1024, 2048, 1, "packets"), 2, 128, 256),
    (Layer(4096, 1024, 2048, 2, "flags"), 8, 128, 256),
    (Layer(512, 256, 256, 4, "packets", "dot"), 8, 16, 256),
    (Layer(512, 256, 256, 8, "flags", "dot"), 2, 8, 256),
    (Layer(6144, 1024, 2048, 8, "flags"), 8, 128, 256),
    (Layer(6144, 1024, 2048, 16, "packets"), 2, 128, 256),
    (Layer(6144, 1024, 2048, 48, "packets"), 2, 128, 256),
]
DOTS, MATRIX = VARIANTS[:4], VARIANTS[4:]
PRODUCTS = dict.fromkeys(("gfx942", "gfx950"), "v_mfma_f32_16x16x16_bf16")  # another chip multiplies portably
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


def _name(layer):
    return f"{layer.hidden}-{layer.protocol}-{layer.math}-r{layer.rows}"


@cache
def specialization(variant):
    layer, world, blocks, threads = variant
    return Specialization("mono", kernel.build(layer), world, "bf16", blocks, threads, 256)


CASES = [(one, arch) for one in DOTS for arch in ARCHES] + [(one, arch) for one in MATRIX for arch in PRODUCTS]


@needs_linker
@pytest.mark.parametrize(("variant", "arch"), CASES, ids=lambda v: v if isinstance(v, str) else _name(v[0]))
def test_code(variant, arch):
    layer = variant[0]
    built = build(specialization(variant), arch)
    assert built.metadata[".private_segment_fixed_size"] == 0, "scratch memory"
    assert built.metadata[".vgpr_spill_count"] == 0
    assert rules.polls_keep_the_caches(built.function, built.accesses) == []
    assert rules.peer_memory_is_not_cached(built.accesses) == []
    acquired = [i for i, one in enumerate(built.function.instructions()) if one.invalidates()]
    assert len(acquired) == (2 if layer.protocol == "packets" else 3), "one for a wait"
    products = {one.opcode for one in built.function.instructions() if "mfma" in one.opcode}
    assert products == ({PRODUCTS[arch]} if variant in MATRIX else set())


@needs_linker
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("variant", VARIANTS[:2], ids=lambda v: v[0].protocol)
def test_later_weights_are_loaded_before_the_wait(variant, arch):
    """With one turn a stage, what is loaded after the last wait is what was not loaded ahead."""
    layer, _, blocks, threads = variant
    shape = Shape(layer.hidden, layer.inter, layer.rows, blocks, threads, False, layer.out)
    assert turns(layer.tiles["projection"], blocks, shape.groups) == 1
    code = build(specialization(variant), arch).function.instructions()
    last = max(i for i, one in enumerate(code) if one.invalidates())
    steps = shape.fragments // GROUP
    loads = sum(one.opcode == "global_load_dwordx4" for one in code[last:])
    assert loads == steps * (layer.rows + 2) - shape.ahead


def windows(layer):
    """Segments that a group loads at a time in gate_up, down and projection."""
    return [window_of(-(-length // 32 // 8)) for length in (layer.hidden, layer.inter, layer.hidden)]


@needs_linker
@pytest.mark.parametrize("arch", PRODUCTS)
@pytest.mark.parametrize("variant", MATRIX, ids=lambda v: f"r{v[0].rows}")
def test_weights_stay_on_their_way(variant, arch):
    """A wave waits for the oldest loads alone: of a window's, a segment's are awaited while the others travel."""
    window, tiles = windows(variant[0])[0], -(-variant[0].rows // 16)
    code = build(specialization(variant), arch).function.instructions()
    products = [i for i, one in enumerate(code) if "mfma" in one.opcode]
    before = sum(one.opcode == "global_load_dwordx4" for one in code[: products[0]])
    assert before >= window, "a fragment of each of sixteen weight rows, for each segment"
    second = code[products[2 * window * tiles] : products[4 * window * tiles - 1]]  # the window after that
    waits = [int(word[len("vmcnt(") : -1]) for one in second for word in one.words if word.startswith("vmcnt(")]
    assert waits
    assert min(waits) >= window


@cache
def ptx(variant):
    fixed = specialization(variant)
    with targets.compiling_for("cuda", "sm_90"):
        (image,) = _lowered.lower(fixed.launcher(), fixed.placeholders()).binaries.values()
    return image.decode()


@pytest.mark.parametrize("variant", MATRIX, ids=lambda v: f"r{v[0].rows}")
def test_nvidia_multiplies_by_matrix_instructions(variant):
    """A window of weights is loaded before the loop of each stage, and one in it; nothing is unrolled more."""
    layer, text = variant[0], ptx(variant)
    found, segments = instructions(text), sum(windows(layer))
    assert {one: count for one, count in found.items() if one.startswith("mma")} == {
        MMA: segments * 2 * 2 * -(-layer.rows // 16)  # 8 of 16 weight rows each, 32 of 64 bytes
    }
    assert found["ld.global.v4.b32"] >= segments * 2 * 2
    before = text[: text.index("mma.sync")].count("ld.global.v4.b32")
    assert before >= 2 * windows(layer)[0], "on their way when the first is multiplied"
    assert ".local" not in text
    assert len(text) < 160_000


@needs_ptxas
@pytest.mark.parametrize("variant", [VARIANTS[0], *MATRIX], ids=lambda v: f"r{v[0].rows}")
def test_registers_of_nvidia_suffice(variant):
    assert " 0 bytes spill stores" in assemble(ptx(variant), "sm_90")
