# SPDX-License-Identifier: Apache-2.0
"""The litmus kernels compile for GPUs, and their orders are in the code: one fenced by accident would prove little."""

from __future__ import annotations

import re

import flydsl.compiler as flyc
import pytest
from build import Built, build, needs_linker

from flycomm import targets
from flycomm.compile import ARCHES
from flycomm.kernels.litmus import litmus
from flycomm.litmus.verdict import CASES

BLOCKS, THREADS = 32, 256


def _built(case: tuple[str, str], arch: str = "gfx942", world: int = 2) -> Built:
    return build(litmus(world, *case, BLOCKS, THREADS), arch)


@needs_linker
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_amd(case: tuple[str, str]):
    built = _built(case)
    for what in (".private_segment_fixed_size", ".vgpr_spill_count", ".sgpr_spill_count"):
        assert built.metadata[what] == 0, what
    assert not [one for one in built.function.instructions() if one.opcode.startswith("flat_")]


@needs_linker
@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_amd_everywhere(case: tuple[str, str], world: int, arch: str):
    metadata = _built(case, arch, world).metadata
    assert (metadata[".private_segment_fixed_size"], metadata[".vgpr_spill_count"]) == (0, 0)


def _count(case: tuple[str, str], pattern: str) -> int:
    found = [str(one) for one in _built(case).function.instructions()]
    return sum(bool(re.search(pattern, one)) for one in found)


@needs_linker
def test_orders_differ_in_amd_code_where_they_should():
    meets = _count(("mp", "relaxed"), "s_barrier")
    assert _count(("mp", "library"), "s_barrier") == meets + 2
    for shape in ("sb", "iriw"):
        plain, acquired, fenced = (_count((shape, order), "buffer_inv") for order in ("relaxed", "library", "fenced"))
        assert (acquired, fenced) == (plain + 1, plain + 1)
        written_back = [_count((shape, order), "buffer_wbl2") for order in ("relaxed", "library", "fenced")]
        assert written_back[0] == written_back[1] == written_back[2] - 1


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_cuda(case: tuple[str, str]):
    one = litmus(2, *case, BLOCKS, THREADS)
    with targets.compiling_for("cuda", "sm_90"):
        flyc.compile(one.launcher(), *one.placeholders())
