# SPDX-License-Identifier: Apache-2.0
"""The local top-k for AMD and NVIDIA GPUs: no scratch memory, and candidates published as the memory model demands."""

from __future__ import annotations

import flydsl.compiler as flyc
import pytest
from build import build, needs_linker

from flycomm import targets
from flycomm.compile import ARCHES
from flycomm.kernels._topk_plan import plan
from flycomm.kernels.topk_local import specialization

ROWS, SPLIT = (8192, 16), (1 << 20, 2048)  # columns and k: one block a row, 32 blocks a row
QUICK = [("f32", *ROWS, True, True, True), ("bf16", *SPLIT, True, True, True)]
REST = [
    ("f32", *SPLIT, False, False, False),
    ("f16", 16384, 2048, False, True, True),
    ("f32", 1 << 22, 64, True, False, True),
]
CASES = [*QUICK, *(pytest.param(*one, marks=pytest.mark.full) for one in REST)]
PARAMETERS = ("dtype", "columns", "k", "by_score", "low", "wide")


def _specialization(dtype, columns, k, by_score, low, wide):
    return specialization(plan(False, columns, k), dtype, by_score, low, wide)


@needs_linker
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(PARAMETERS, CASES)
def test_amd(arch, dtype, columns, k, by_score, low, wide):
    built = build(_specialization(dtype, columns, k, by_score, low, wide), arch)
    assert built.metadata[".private_segment_fixed_size"] == 0
    assert built.metadata[".vgpr_spill_count"] == 0
    assert built.metadata[".group_segment_fixed_size"] <= 48 << 10


@needs_linker
@pytest.mark.parametrize("arch", [ARCHES[0], pytest.param(ARCHES[1], marks=pytest.mark.full)])
def test_candidates_are_published_before_the_block_is_counted(arch):
    """Every wave waits for its own stores, then the barrier, then one wave writes the cache back and counts."""
    code = build(_specialization("bf16", *SPLIT, True, True, True), arch).function.instructions()
    write_back = next(i for i, one in enumerate(code) if one.opcode == "buffer_wbl2")
    barrier = max(i for i in range(write_back) if code[i].is_barrier())
    stored = max(i for i in range(barrier) if code[i].opcode.startswith("global_store"))
    assert any(one.waits_for_stores() for one in code[stored:barrier]), "waits for its own stores before the barrier"
    counted = next(i for i in range(write_back, len(code)) if code[i].opcode.startswith("global_atomic"))
    assert any(one.waits_for_stores() for one in code[write_back:counted])
    seen = next(i for i in range(counted, len(code)) if code[i].invalidates())
    assert not any(one.opcode.startswith("global_load") for one in code[counted:seen])
    assert any(one.opcode.startswith("global_load_dwordx2") for one in code[seen:]), "candidates are read after that"


@pytest.mark.parametrize(PARAMETERS, CASES)
def test_cuda(dtype, columns, k, by_score, low, wide):
    kernel = _specialization(dtype, columns, k, by_score, low, wide)
    with targets.compiling_for("cuda", "sm_90"):
        flyc.compile(kernel.launcher(), *kernel.placeholders())
