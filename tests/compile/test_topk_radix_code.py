# SPDX-License-Identifier: Apache-2.0
"""Radix and split of the top-k exchange as AMD code: no scratch, words at system scope, polls that keep the caches."""

from __future__ import annotations

import re

import isa_rules as rules
import pytest
from build import build, needs_linker

from flycomm import targets
from flycomm.compile import ARCHES, _lowered
from flycomm.kernels import topk_exchange, topk_radix
from flycomm.kernels._topk_exchange_plan import MAX_ROWS, RADIX_BLOCKS, plan, radix_plan

pytestmark = needs_linker

# mode, source, columns, k, by score, low ties, wide, forced, world, dtype
VARIANTS = [
    ("all", "scores", 8192, 2048, True, True, True, False, 8, "f32"),
    ("owner", "scores", 2048, 64, False, False, False, True, 8, "bf16"),
    ("shard", "scores", 1 << 17, 2048, True, True, True, False, 4, "f32"),
    ("all", "candidates", 1024, 1024, False, True, True, False, 3, "f32"),
    ("all", "scores", 8192, 512, True, True, True, False, 1, "f16"),
    ("split", "scores", 16384, 2048, True, True, True, False, 8, "f32"),
    ("split", "candidates", 512, 512, False, True, True, False, 3, "f32"),
]
# two in the quick set
CASES = [
    pytest.param(variant, arch, marks=() if (i, j) in ((0, 0), (6, 1)) else pytest.mark.full)
    for i, variant in enumerate(VARIANTS)
    for j, arch in enumerate(ARCHES)
]


def _id(value):
    return value if isinstance(value, str) else "-".join(map(str, value))


def _specialization(mode, source, columns, k, *rest):
    split = mode == "split"
    chosen = (plan if split else radix_plan)(False, columns, k)
    of = chosen.columns if source == "scores" else 0
    if split:
        return topk_exchange.specialization(mode, source, of, chosen.k, *rest, MAX_ROWS[chosen.k], chosen.threads)
    return topk_radix.specialization(mode, source, of, chosen.k, 2048, *rest, RADIX_BLOCKS, chosen.threads)


def test_between_two_rows_zeroes_land_on_nvidia_too():
    """A relaxed word carries nothing, so there has to be a fence of its own; a kernel that pushes has none."""
    with targets.compiling_for("cuda", "sm_90"):
        texts = []
        for variant in (VARIANTS[3], VARIANTS[6]):
            one = _specialization(*variant)
            (image,) = _lowered.lower(one.launcher(), one.placeholders()).binaries.values()
            texts.append(image.decode())
    assert [len(re.findall(r"fence\.acq_rel\.sys;\n(?!\s*st\.release)", text)) for text in texts] == [1, 0]


@pytest.mark.parametrize(("variant", "arch"), CASES, ids=_id)
def test_code(variant, arch):
    world = variant[-2]
    built = build(_specialization(*variant), arch)
    assert built.metadata[".private_segment_fixed_size"] == 0, "scratch memory"
    assert built.metadata[".vgpr_spill_count"] == 0
    function, found = built.function, built.accesses
    assert rules.polls_keep_the_caches(function, found) == []
    assert rules.peer_memory_is_not_cached(found) == []
    assert not any(one.invalidates() for one in function.instructions()), "nothing is acquired"
    assert (len(rules.polls(function, found)) > 0) == (world > 1)
    if built.metadata[".sgpr_spill_count"]:
        return  # the data flow of addresses cannot be followed through lanes
    assert rules.peer_memory_is_at_system_scope(found) == []
    pushed = [one for one in found if one.kind == "store" and rules.to_peer(one) and one.num_bytes == 8]
    assert len(pushed) >= 2 * (world - 1), "a pair to each peer"
