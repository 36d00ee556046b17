# SPDX-License-Identifier: Apache-2.0
"""What the cuda target makes of FlyDSL code: PTX, read as text, and assembled where ptxas is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from functools import cache
from typing import Any

import cuda_kernels as kernels
import flydsl.expr as fx
import pytest

from flycomm import targets
from flycomm.compile import _lowered
from flycomm.errors import TargetError, UnsupportedOnTarget
from flycomm.kernels import SHIPPED, Specialization
from flycomm.targets import _cuda_math, cuda

CHIPS = ("sm_80", "sm_90", "sm_100")
NOWHERE = fx.Int64(0)


@cache
def ptx(launcher: Any, *arguments: Any, chip: str = "sm_90") -> str:
    with targets.compiling_for("cuda", chip):
        (image,) = _lowered.lower(launcher, arguments).binaries.values()
    return image.decode()


def instructions(text: str) -> Counter[str]:
    """How often each opcode occurs."""
    return Counter(re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][a-z0-9_.:]+)[ ;]", text.replace("\t", " "), re.MULTILINE))


WHOLE_WARPS = {"31, -1"}  # clamp and mask: a lane that the mask leaves out must not shuffle at all


def shuffles(text: str) -> set[str]:
    """Which lanes the shuffles of a text are of."""
    return set(re.findall(r"shfl\.sync[^;]*, (-?\w+, -?\w+);", text))


def assemble(text: str, chip: str) -> str:
    """What ptxas says of a text that it accepts."""
    command = ("ptxas", f"-arch={chip}", "-v", "-o", os.devnull, "-")
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


needs_ptxas = pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas (of the CUDA toolkit) is not installed")


# ---- shared memory


def test_two_shared_arrays_are_two_memories():
    text = ptx(kernels.shared, NOWHERE)
    arrays = re.findall(r"\.shared \.align \d+ \.b8 (\w+)\[256\]", text)
    assert len(set(arrays)) == 2
    assert ".extern .shared" not in text


def test_dynamic_shared_memory_stays_external():
    text = ptx(kernels.dynamic, NOWHERE)
    assert re.search(r"\.extern \.shared \.align \d+ \.b8 \w+\[\]", text)


@needs_ptxas
def test_shared_arrays_add_up():
    assert "512 bytes smem" in assemble(ptx(kernels.shared, NOWHERE), "sm_90")


# ---- memory model


def test_system_scope_accesses_are_what_protocols_need():
    text = ptx(kernels.orders, NOWHERE)
    found = instructions(text)
    for opcode in (
        "ld.relaxed.sys.global.b64",
        "st.relaxed.sys.global.b64",
        "ld.acquire.sys.global.b64",
        "st.release.sys.global.b64",
        "fence.acq_rel.sys",
        "ld.volatile.global.v4.b32",
        "st.volatile.global.v4.b32",
        "atom.relaxed.sys.global.cas.b64",
    ):
        assert found[opcode] == 1, f"{opcode} in\n{text}"


def test_scopes_of_amd_have_their_ptx_names():
    found = instructions(ptx(kernels.scopes, NOWHERE))
    for scope in ("sys", "gpu", "cta"):
        assert found[f"atom.relaxed.{scope}.global.add.u32"] == 1, found
        assert found[f"fence.acq_rel.{scope}"] == 1, found


def test_unknown_scope_is_refused():
    @kernels.flyc.kernel
    def kernel(out: fx.Int64):
        fx.atomic_add(kernels.at(out, fx.Uint32), fx.Uint32(1), syncscope="galaxy")

    @kernels.flyc.jit
    def launch(out: fx.Int64, stream: fx.Stream = kernels.DEFAULT_STREAM):
        kernel(out).launch(grid=(1,), block=(1,), stream=stream)

    with pytest.raises(UnsupportedOnTarget, match=r"llvm\.atomicrmw .*'galaxy'.*test_ptx\.py"):
        ptx(launch, NOWHERE)


# ---- the same bits everywhere


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_rank_sums_are_plain_f32_additions_from_zero(ranks: int):
    found = instructions(ptx(kernels.rank_sum, NOWHERE, NOWHERE, ranks))
    assert found["add.rn.f32"] == 8 * ranks  # the first adds to +0.0: -0.0 becomes +0.0
    assert not any(opcode.startswith(("fma", "add.rn.bf16", "add.f32")) for opcode in found)


def test_multiply_and_add_are_two_roundings():
    found = instructions(ptx(kernels.multiply_add, fx.Float32(1), fx.Float32(2), NOWHERE))
    assert (found["mul.rn.f32"], found["add.rn.f32"]) == (1, 1)
    assert not any(opcode.startswith("fma") for opcode in found)


def test_square_roots_are_correctly_rounded():
    found = instructions(ptx(kernels.math, fx.Float32(1), NOWHERE))
    assert found["sqrt.rn.f32"] == 1  # the one of rsqrt is the same value
    assert found["rcp.rn.f32"] == 1
    assert found["ex2.approx.f32"] == 1
    assert not found["call.uni"]


def test_nothing_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    """MLIR would take libdevice from there, with another square root, and abort where there is none."""
    for name in ("CUDA_HOME", "CUDA_ROOT", "CUDA_PATH"):
        monkeypatch.setenv(name, "/nonexistent")
    expected = ptx(kernels.math, fx.Float32(1), NOWHERE)
    ptx.cache_clear()
    kernels.math._mem_cache.clear()
    assert ptx(kernels.math, fx.Float32(1), NOWHERE) == expected


# ---- what an ordinary kernel uses


def test_cooperative_algorithms_use_warps_of_32():
    found = instructions(ptx(kernels.coop, NOWHERE))
    assert found["shfl.sync.bfly.b32"] == 5  # log2 of 32
    assert found["bar.sync"] == 2


def test_print_clock_and_two_dimensions():
    text = ptx(kernels.speak, NOWHERE)
    assert "%globaltimer" in text
    assert "vprintf" in text
    assert "%ctaid.y" in text


def test_amd_operations_are_refused_by_name():
    with pytest.raises(UnsupportedOnTarget, match=r"rocdl\.s\.waitcnt .*cuda_kernels\.py"):
        ptx(kernels.amd, NOWHERE)


def test_shuffles_of_parts_of_a_warp_are_refused():
    @kernels.flyc.kernel
    def kernel(out: fx.Int64):
        t = fx.Int32(fx.thread_idx.x)
        kernels.store(out, t, fx.Int32(fx.gpu.shuffle_xor(t, 1, 4)))

    @kernels.flyc.jit
    def launch(out: fx.Int64, stream: fx.Stream = kernels.DEFAULT_STREAM):
        kernel(out).launch(grid=(1,), block=(32,), stream=stream)

    with pytest.raises(UnsupportedOnTarget, match=r"gpu\.shuffle .*the first 4 lanes .*width of 32.*test_ptx\.py"):
        ptx(launch, NOWHERE)


def test_libdevice_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda, "_libdevice", lambda: "")
    kernels.exp._mem_cache.clear()
    with pytest.raises(UnsupportedOnTarget, match=r"math\.exp .*libdevice"):
        ptx(kernels.exp, fx.Float32(1), NOWHERE)


@pytest.mark.skipif(not _cuda_math.find_libdevice(), reason="no libdevice here: neither a CUDA toolkit nor triton")
def test_libdevice_is_linked_where_it_is():
    text = ptx(kernels.exp, fx.Float32(1), NOWHERE)
    assert "__nv_" not in text
    assert instructions(text)["ex2.approx.ftz.f32"] == 1


# ---- chips


@pytest.mark.parametrize(
    ("capability", "chip", "version"),
    [
        (80, "sm_80", 80),
        (86, "sm_86", 80),
        (90, "sm_90", 80),
        (100, "sm_100", 86),
        (99, "sm_90", 80),
        (150, "sm_121", 88),
    ],
)
def test_chip_of_a_device(capability: int, chip: str, version: int):
    assert cuda.chip(capability) == chip
    assert cuda.features(chip) == f"+ptx{version}"


def test_old_and_unknown_chips_are_refused():
    with pytest.raises(TargetError, match=r"7\.5 is below 8\.0"):
        cuda.chip(75)
    with pytest.raises(TargetError, match="'gfx942' is not one of sm_80"):
        cuda.features("gfx942")


@pytest.mark.parametrize("chip", CHIPS)
def test_text_is_for_the_chip(chip: str):
    assert f".target {chip}\n" in ptx(kernels.orders, NOWHERE, chip=chip)


@needs_ptxas
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("launcher", ["shared", "dynamic", "orders", "scopes", "coop", "speak"])
def test_assembler_accepts(launcher: str, chip: str):
    assemble(ptx(getattr(kernels, launcher), NOWHERE, chip=chip), chip)


@needs_ptxas
@pytest.mark.parametrize(
    "specialization",
    [pytest.param(one, id=one.name, marks=() if one.world == 3 else pytest.mark.full) for one in SHIPPED],
)
def test_assembler_accepts_shipped(specialization: Specialization):
    text = ptx(specialization.launcher(), *specialization.placeholders())
    assemble(text, "sm_90")
    assert ".nc" not in text  # peers write what is read here
