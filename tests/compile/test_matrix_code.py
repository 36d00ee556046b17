# SPDX-License-Identifier: Apache-2.0
"""Index scores for AMD and NVIDIA GPUs: matrix instructions, keys loaded ahead by 16 bytes, no scratch memory."""

from __future__ import annotations

import re
from functools import cache

import pytest
from build import build, needs_linker
from test_ptx import WHOLE_WARPS, assemble, instructions, needs_ptxas, shuffles

from flycomm import targets
from flycomm.compile import _lowered
from flycomm.kernels.index_scores import Scorer, best_threads, specialization
from flycomm.primitives.index_score_keys import FORMATS, TILES
from flycomm.primitives.index_score_warpgroup_query import rows_at_once
from flycomm.primitives.warpgroup import HALVES

BF16, F16 = (f"mma.sync.aligned.m16n8k16.row.col.f32.{one}.{one}.f32" for one in ("bf16", "f16"))
PRODUCTS = 8  # instructions for a tile of 16 rows and 8 keys of 128 elements
DSA, MAX = Scorer("dsa", "e4m3fn", 64, 64, 4), Scorer("block_max", "bf16", 4, 128, 4)
REST = [
    Scorer("dsa", "bf16", 64, 64, 2),
    Scorer("dsa", "e2m1", 32, 64, 4),
    Scorer("dsa", "e4m3fn", 32, 16, 8),
    Scorer("block_max", "e4m3fn", 4, 128, 4),
    Scorer("block_max", "bf16", 4, 128, 8),
]
MORE = [(64, 64, 1), (32, 64, 4), (32, 16, 8), (16, 64, 8), (48, 128, 4)]
CASES = [DSA, MAX, *(pytest.param(one, marks=pytest.mark.full) for one in REST)]


def _specialization(scorer):
    return specialization(scorer, 132, best_threads(scorer))


@cache
def ptx(scorer, chip="sm_90"):
    kernel = _specialization(scorer)
    with targets.compiling_for("cuda", chip):
        (image,) = _lowered.lower(kernel.launcher(), kernel.placeholders()).binaries.values()
    return image.decode()


GROUP = Scorer("dsa", "e4m3fn", 64, 64, 4, "fp8")
GROUPS = [GROUP, *(pytest.param(Scorer("dsa", "e4m3fn", *one, "fp8"), marks=pytest.mark.full) for one in MORE)]


@pytest.mark.parametrize("scorer", GROUPS, ids=lambda one: one.name)
def test_four_warps_multiply_by_wgmma(scorer):
    """Keys from registers, in one statement with the wait; loads of a step's keys before it, for the next step."""
    text = ptx(scorer)
    found = instructions(text)
    at_once = rows_at_once(scorer.heads, scorer.rows)
    products = -(-scorer.rows // at_once)
    columns = scorer.heads * at_once
    assert text.count(f"wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3") == 4 * products
    assert text.count("wgmma.wait_group.sync.aligned 0") == text.count("wgmma.commit_group") == products
    assert not any(one.startswith(("mma", "cvt.rn.f16x2")) for one in found)
    staged = -(-scorer.rows * scorer.heads * 8 // best_threads(scorer))
    assert found["ld.global.v4.b32"] == staged + 2 * 2 * HALVES
    assert text.index("fence.proxy.async.shared::cta") < text.rindex("bar.sync") < text.index("wgmma.fence")
    assert ".target sm_90a\n" in text
    assert re.search(rf"\.shared \.align 1024 \.b8 \w+\[{128 * scorer.heads * scorer.rows}\]", text)
    assert shuffles(text) == WHOLE_WARPS
    assert ".local" not in text


def test_only_what_needs_it_is_for_that_chip_alone():
    assert ".target sm_90\n" in ptx(DSA)


@needs_ptxas
@pytest.mark.parametrize("scorer", GROUPS, ids=lambda one: one.name)
def test_nothing_waits_between_products(scorer):
    said = assemble(ptx(scorer), "sm_90a")
    assert "serialized" not in said, said
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert spilled
    assert int(spilled[1]) <= 192, said  # of what is kept over the loop


@pytest.mark.parametrize("scorer", CASES, ids=lambda one: one.name)
def test_nvidia(scorer):
    """Nothing is multiplied by other means, and 8-bit keys are widened once for all rows."""
    text = ptx(scorer)
    found = instructions(text)
    fmt = FORMATS[scorer.cache]
    fp8 = scorer.cache == "e4m3fn"
    tiles = 1 if scorer.kind == "dsa" else -(-scorer.rows * scorer.heads // 16)
    products = PRODUCTS * TILES * tiles
    assert {one: count for one, count in found.items() if one.startswith("mma")} == {F16 if fp8 else BF16: products}
    words = 4 * fmt.segments * (TILES + 2 * tiles)
    assert text.count("cvt.rn.f16x2.e4m3x2") == (2 * words if fp8 else 0)
    # queries once; keys before the loop, and ahead of each step
    assert found["ld.global.v4.b32"] == 1 + 2 * fmt.loads * TILES
    assert shuffles(text) == WHOLE_WARPS
    assert ".local" not in text


@needs_ptxas
@pytest.mark.parametrize("scorer", CASES, ids=lambda one: one.name)
def test_registers_hold_what_is_loaded_ahead(scorer):
    said = assemble(ptx(scorer), "sm_90")
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert spilled
    assert int(spilled[1]) <= 192, (
        said
    )  # addresses and the like, but not keys: those of one step are 512 bytes and more


def test_every_chip_multiplies_bf16():
    assert BF16 in ptx(MAX, "sm_80")


@pytest.mark.full
def test_a_chip_that_cannot_convert_e4m3_multiplies_otherwise():
    assert "mma.sync" not in ptx(Scorer("block_max", "e4m3fn", 4, 128, 4), "sm_80")


AMD = [
    (DSA, "gfx950", "v_mfma_f32_16x16x32_fp8_fp8"),
    (Scorer("dsa", "e4m3fnuz", 64, 64, 4), "gfx942", "v_mfma_f32_16x16x32_fp8_fp8"),
    (MAX, "gfx942", "v_mfma_f32_16x16x16_bf16"),
    pytest.param(MAX, "gfx950", "v_mfma_f32_16x16x16_bf16", marks=pytest.mark.full),
    pytest.param(REST[1], "gfx942", "v_mfma_f32_16x16x16_bf16", marks=pytest.mark.full),
    pytest.param(REST[1], "gfx950", "v_mfma_f32_16x16x16_bf16", marks=pytest.mark.full),
    pytest.param(DSA, "gfx942", "", marks=pytest.mark.full),  # the other e4m3: portable
    pytest.param(MAX, "gfx1250", "", marks=pytest.mark.full),
]


@needs_linker
@pytest.mark.parametrize(("scorer", "arch", "opcode"), AMD)
def test_amd(scorer, arch, opcode):
    built = build(_specialization(scorer), arch)
    assert built.metadata[".private_segment_fixed_size"] == 0
    assert built.metadata[".vgpr_spill_count"] == 0
    assert built.metadata[".group_segment_fixed_size"] <= 40 << 10
    code = built.function.instructions()
    matrix = [one.opcode for one in code if "mfma" in one.opcode]
    assert set(matrix) == ({opcode} if opcode else set())
    fmt = FORMATS[scorer.cache]
    assert len(matrix) % (2 * fmt.segments * TILES) == 0
    wide = [one for one in built.accesses if one.kind == "load" and one.num_bytes == 16]
    assert len(wide) >= 1 + 2 * fmt.loads * TILES
