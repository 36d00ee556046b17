# SPDX-License-Identifier: Apache-2.0
"""The indexer with its own scoring kernel: against NumPy where sums are exact, and against itself on one rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from flycomm.indexer.kinds import BLOCK_MAX, DSA
from flycomm.indexer.scores import IndexScores
from tests import indexer_oracle as oracle
from tests.indexer_oracle import BLOCKS, TOKENS, Case, packed
from tests.ranks import run

SMALL = replace(Case(), seq_lens=(200, 65, 0), queries=(2, 1, 5), padding=1, most=256, width=128)
DSA_CASE = replace(SMALL, indexer=TOKENS, heads=16, cache="replicated", order="index")
LAST_COUNTS = replace(BLOCKS, forced=(1, 0))  # the block that a row sees in part is not forced
BLOCK_CASE = replace(
    SMALL, world=3, indexer=LAST_COUNTS, granule=128, page=128, mode="owner", seq_lens=(600, 200, 0), most=640
)


def _made(comm, case, format, **options):
    scorer = IndexScores(comm, case.indexer, format, case.heads, case.page, **options)
    return oracle.made(comm, case, scorer)


CASES = [
    (DSA_CASE, "e4m3fn"),
    (BLOCK_CASE, "bf16"),
    (BLOCK_CASE, "e4m3fn"),
    pytest.param(replace(DSA_CASE, world=3, granule=1, cache="sharded", mode="shard"), "bf16", marks=pytest.mark.full),
    pytest.param(replace(DSA_CASE, heads=32, granule=128, cache="sharded"), "e4m3fnuz", marks=pytest.mark.full),
    pytest.param(replace(DSA_CASE, world=4, heads=64, mode="owner"), "e2m1", marks=pytest.mark.full),
    pytest.param(
        replace(BLOCK_CASE, world=2, granule=0, cache="replicated", mode="all"), "bf16", marks=pytest.mark.full
    ),
    pytest.param(replace(BLOCK_CASE, world=8, topk_rows=4), "e4m3fn", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("case", "format"), CASES, ids=lambda one: one if isinstance(one, str) else one.indexer.kind)
def test_equals_one_rank_that_scores_everything(case, format):
    def body(comm):
        indexer = _made(comm, case, format)
        for one in oracle.several(case, 2):
            oracle.check(indexer, comm, one, partial(packed, format=format, scaled=case.indexer.kind == "dsa"))

    run(case.world, body, **case.options)


@pytest.mark.parametrize(
    ("case", "format", "math"),
    [
        (DSA_CASE, "e4m3fn", "f32"),
        (replace(DSA_CASE, granule=64), "e4m3fn", "fp8"),
        (replace(BLOCK_CASE, cache="replicated"), "bf16", "auto"),
    ],
    ids=["dsa", "dsa-fp8", "block_max"],
)
def test_shared_or_alone_the_bits_are_the_same(case, format, math):
    """Of numbers whose sums are rounded."""
    case = replace(case, whole=False)

    def body(comm):
        found = []
        for parallel in (True, False):
            one = replace(case, parallel=parallel)
            indexer = _made(comm, one, format, scale=0.3, math=math)
            found.append(oracle.call(indexer, comm, one, partial(packed, format=format)))
        for one, other in zip(*found, strict=True):
            assert np.array_equal(one.view(np.uint32), other.view(np.uint32))
        assert (found[0][1] >= 0).any()

    run(case.world, body, **case.options)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": lambda x: x[:, :2]}, r"q is \(9, 2, 128\)"),
        ({"q": lambda x: x.float()}, "torch.float32"),
        ({"weights": lambda x: None}, "weights are None, and dsa has some"),
        ({"weights": lambda x: x.double()}, "weights is"),
        ({"table": lambda x: x.long()}, "the block table is .* torch.int64"),
        ({"cache": lambda x: x[:, :-1].contiguous()}, "pages of the cache are 8447 bytes apart"),
        ({"cache": lambda x: x.new_empty(len(x), 8449)}, "pages 8449 bytes apart"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(change, says):
    case = replace(DSA_CASE, world=1)

    def wrong(x):
        x = packed(x, "e4m3fn")
        return x | {name: made(x[name]) for name, made in change.items()}

    def body(comm):
        with pytest.raises(ValueError, match=says):
            oracle.call(_made(comm, case, "e4m3fn"), comm, case, wrong)

    run(1, body, **case.options)


@pytest.mark.parametrize("layout", [{"token_stride": 132}, {"scale_offset": 8190}], ids=str)
def test_keys_that_are_not_aligned_are_refused(layout):
    def body(comm):
        with pytest.raises(ValueError, match="keep keys and scales of a page in planes of their own"):
            IndexScores(comm, DSA, "e4m3fn", 16, 64, **layout)

    run(1, body)


def test_an_indexer_of_other_lists_is_refused():
    def body(comm):
        for arguments, says in (
            ((replace(DSA, lists=4), "bf16", 16, 64), "use lists=1 and block=1"),
            ((BLOCK_MAX, "bf16", 8, 128), "use lists=8 and block=128"),
            ((DSA, "fp7", 16, 64), "cache='fp7'"),
        ):
            with pytest.raises(ValueError, match=says):
                IndexScores(comm, *arguments)

    run(1, body)
