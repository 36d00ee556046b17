# SPDX-License-Identifier: Apache-2.0
"""The top-k exchange as AMD code: no scratch, words at system scope, polls that throw no cache away."""

from __future__ import annotations

import isa_rules as rules
import pytest
from build import build, needs_linker

from flycomm.compile import ARCHES
from flycomm.kernels._topk_exchange_plan import MAX_ROWS, plan
from flycomm.kernels.topk_exchange import SOURCES, specialization

pytestmark = needs_linker

# mode, source, columns, k, by score, low ties, wide, forced, world, dtype
VARIANTS = [
    ("all", "scores", 8192, 64, True, True, True, False, 2, "f32"),
    ("owner", "scores", 2048, 64, True, True, True, True, 8, "f32"),
    ("owner", "scores", 8192, 64, False, False, False, False, 8, "bf16"),
    ("all", "scores", 16384, 2048, True, True, True, False, 8, "f32"),
    ("shard", "scores", 1 << 17, 1024, False, True, True, False, 4, "f16"),
    ("shard", "candidates", 2048, 2048, False, True, True, False, 8, "f32"),
    ("owner", "candidates", 512, 512, True, True, True, False, 3, "f32"),
    ("all", "scores", 8192, 512, True, True, True, False, 1, "f32"),
]
# one chip each in the quick set, in turn
CASES = [
    pytest.param(variant, arch, marks=() if (i + j) % 2 else pytest.mark.full)
    for i, variant in enumerate(VARIANTS)
    for j, arch in enumerate(ARCHES)
]


def _id(value):
    return value if isinstance(value, str) else "-".join(map(str, value))


@pytest.mark.parametrize(("variant", "arch"), CASES, ids=_id)
def test_code(variant, arch):
    mode, source, columns, k, *fixed, world, dtype = variant
    chosen = plan(False, columns, k)
    in_registers = chosen.columns if source == SOURCES[0] else 0
    built = build(
        specialization(mode, source, in_registers, chosen.k, *fixed, world, dtype, MAX_ROWS[chosen.k], chosen.threads),
        arch,
    )
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
