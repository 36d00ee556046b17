# SPDX-License-Identifier: Apache-2.0
"""The indexer in one launch as AMD code: no scratch, one acquire, words at system scope, weights before the wait."""

from __future__ import annotations

import isa_rules as rules
import pytest
from build import build, needs_linker

from flycomm.compile import ARCHES
from flycomm.kernels import Specialization
from flycomm.kernels.index_scores import Scorer
from flycomm.kernels.mono_indexer import Layer
from flycomm.kernels.mono_indexer import build as build_layer

pytestmark = needs_linker

BLOCKS = Scorer("block_max", "bf16", 4, 128)
TOKENS = Scorer("dsa", "e4m3fn", 64, 64)

# layer, world, blocks, threads
VARIANTS = [
    (Layer(BLOCKS, 64, 4096, 512, 1024, 4, "owner", forced=True), 2, 64, 256),
    (Layer(TOKENS, 2048, 4096, 512, 1024, 4), 2, 64, 256),
    (Layer(BLOCKS, 64, 1024, 512, 1024, 16), 8, 64, 256),
    (Layer(TOKENS, 2048, 1 << 19, 512, 1024, 4, "shard", False), 8, 64, 256),
]
QUICK = {(0, "gfx942"), (1, "gfx950")}
CASES = [
    pytest.param(variant, arch, marks=() if (i, arch) in QUICK else pytest.mark.full)
    for i, variant in enumerate(VARIANTS)
    for arch in ARCHES
]


def _id(one):
    return one if isinstance(one, str) else f"{one[0].scorer.kind}-{one[0].mode}-n{one[0].columns}-w{one[1]}"


@pytest.mark.parametrize(("variant", "arch"), CASES, ids=_id)
def test_code(variant, arch):
    layer, world, blocks, threads = variant
    built = build(Specialization("mono", build_layer(layer), world, "bf16", blocks, threads, 256), arch)
    assert built.metadata[".private_segment_fixed_size"] == 0, "scratch memory"
    assert built.metadata[".vgpr_spill_count"] == 0
    assert built.metadata[".group_segment_fixed_size"] <= 48 << 10, "what a block has on every target"
    function, found = built.function, built.accesses
    assert rules.polls_keep_the_caches(function, found) == []
    assert rules.peer_memory_is_not_cached(found) == []
    code = function.instructions()
    acquired = [i for i, one in enumerate(code) if one.invalidates()]
    assert len(acquired) == 1, "of the blocks' marks: words are their own flags"
    if layer.rows <= 4:  # all of a lane's weights are on their way at the wait
        late = code[acquired[0] :]
        weights = [one.instruction for one in found if one.kind == "load" and "projection" in one.address]
        assert weights
        assert not [one for one in weights if one in late]
    handed_over = {"plane", "scratch"}  # which an acquire does not drop from the scalar cache
    assert not [one for one in found if one.kind == "scalar" and handed_over & set(one.address)]
    if built.metadata[".sgpr_spill_count"]:
        return  # the data flow of addresses cannot be followed through lanes
    assert rules.peer_memory_is_at_system_scope(found) == []
    pushed = [one for one in found if one.kind == "store" and rules.to_peer(one) and one.num_bytes == 8]
    assert len(pushed) >= 2 * (world - 1), "a pair to each peer"
