# SPDX-License-Identifier: Apache-2.0
"""All-reduce + norm as AMD code and as PTX: no scratch, all experts' rows on their way together, no hidden fma."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import isa_rules as rules
import pytest
from build import build, needs_linker
from test_ptx import WHOLE_WARPS, shuffles

from flycomm import targets
from flycomm.compile import ARCHES, _lowered
from flycomm.kernels import Specialization, reduce_norm
from flycomm.kernels.reduce_norm import Variant
from flycomm.primitives.experts import Experts

EACH = 4  # fragments of a thread: 8192 elements of a row by 256 threads

# protocol, variant, world, blocks, threads
KERNELS = [
    ("packets", Variant(8192), 8, 16, 256),
    ("packets", Variant(8192, experts=Experts(8, "f32", permuted=True, shared=True)), 8, 16, 256),
    ("flags", Variant(8192, experts=Experts(16, "f32", permuted=True)), 8, 64, 256),
    ("packets", Variant(7168, exact=True, single=True), 4, 16, 256),
    ("sentinel", Variant(8192, quantize="token", normed=False, experts=Experts(8)), 2, 48, 256),
]


@cache
def specialization(kernel):
    protocol, variant, world, blocks, threads = kernel
    return Specialization("norm", reduce_norm.build(protocol, variant), world, "bf16", blocks, threads, 256)


def name(kernel):
    return f"{kernel[0]}-{kernel[1].name}"


def marked(kernel, *rest, quick):
    ids = "-".join((name(kernel), *rest))
    return pytest.param(kernel, *rest, id=ids, marks=() if quick else pytest.mark.full)


@needs_linker
@pytest.mark.parametrize(
    ("kernel", "arch"),
    [marked(one, arch, quick=(one, arch) == (KERNELS[1], "gfx950")) for one in KERNELS for arch in ARCHES],
)
def test_amd_code(kernel, arch):
    protocol, variant, *_ = kernel
    built = build(specialization(kernel), arch)
    assert built.metadata[".private_segment_fixed_size"] == 0, "scratch memory"
    assert built.metadata[".vgpr_spill_count"] == 0
    assert rules.polls_keep_the_caches(built.function, built.accesses) == []
    assert rules.peer_memory_is_not_cached(built.accesses) == []
    if protocol == "flags":
        assert rules.flags_follow_a_barrier(built.function, built.accesses, built.single_wave) == []
        assert rules.data_precedes_a_flag(built.function, built.accesses) == []
    if variant.experts is not None and arch != "gfx1250":  # whose counters are read where they are 0
        assert _in_flight(built.function.instructions()) >= EACH * 6


def _in_flight(code) -> int:
    """The most loads of 16 bytes that are on their way together, read from top to bottom."""
    best = 0
    flying: list[bool] = []
    for one in code:
        if one.opcode.startswith(("global_load", "global_store")):
            flying.append(one.opcode == "global_load_dwordx4")
            best = max(best, sum(flying))
        for word in one.words if one.opcode == "s_waitcnt" else ():
            if left := re.fullmatch(r"vmcnt\((\d+)\)", word):
                flying = flying[max(0, len(flying) - int(left[1])) :]
    return best


@pytest.mark.parametrize("kernel", [marked(one, quick=one is KERNELS[-1]) for one in KERNELS if one[1].experts])
def test_products_and_sums_of_experts_are_rounded_apart(kernel):
    """In PTX ``mul.rn`` and ``add.rn``, which ptxas may not join; the fma are those of the norm."""
    protocol, variant, *rest = kernel
    plain = protocol, replace(variant, experts=None), *rest
    assert _count("fma", kernel) == _count("fma", plain)
    assert _count("(?:mul|add)", kernel, rounded=False) == 0
    assert _count("mul", kernel) - _count("mul", plain) == 2 * variant.experts.topk * EACH * 8, "from post and finish"


def test_of_few_rows_of_one_size_the_own_part_is_asked_for_first_and_rounded_by_pairs():
    """One trip to memory before the post, and nothing after the wait that takes a quarter of the rate."""
    code = _ptx(("sentinel", Variant(6144, exact=True, single=True), 2, 32, 256))
    first, rest = code.split("bar.warp.sync", 1)
    loads = re.compile(r"\bld\.global\.\S+")
    assert len(loads.findall(first)) == 3
    assert loads.search(rest)
    assert "cvt.rn.bf16.f32" not in code
    assert "cvt.rn.bf16x2.f32" in code
    assert "cvt.rn.bf16.f32" not in _ptx(("packets", Variant(8192), 4, 16, 256))


def _count(opcode: str, kernel, rounded: bool = True) -> int:
    return len(re.findall(rf"\b{opcode}{'.rn' if rounded else ''}\.f32\b", _ptx(kernel)))


def _ptx(kernel) -> str:
    made = specialization(kernel)
    with targets.compiling_for("cuda", "sm_90"):
        (image,) = _lowered.lower(made.launcher(), made.placeholders()).binaries.values()
    return image.decode()


def test_scales_of_groups_are_folded_by_whole_warps_of_nvidia():
    assert shuffles(_ptx(("flags", Variant(1024, quantize="group"), 2, 4, 128))) == WHOLE_WARPS
