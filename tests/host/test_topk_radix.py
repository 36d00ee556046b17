# SPDX-License-Identifier: Apache-2.0
"""The other algorithms of the top-k exchange, radix and split: the same exact ids as one rank with all scores."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from flycomm.errors import CommTimeout, UsageError
from flycomm.indexer.shard import ShardLayout
from tests import topk_oracle as oracle
from tests.host.topk_ranks import Case, call, check, check_all, several
from tests.model.verdict import name
from tests.ranks import run

RADIX = Case(algo="radix")
SPLIT = Case(algo="split", k=100)
# Every two values of two parameters meet, or nearly.
PAIRWISE = [
    replace(RADIX, world=1, k=64, rows=17, keys=500, granule=64, kind="some nan", mode="shard", order="index"),
    replace(RADIX, world=2, k=1, rows=17, keys=257, granule=64, kind="constant", mode="all", tie_break="high"),
    replace(
        RADIX, world=2, k=600, rows=2, keys=3000, granule=0, kind="levels", mode="owner", order="index", wide=False
    ),
    replace(RADIX, world=3, k=16, rows=4, keys=900, granule=1, kind="zeros", mode="owner", dtype="f16"),
    replace(RADIX, world=3, k=300, rows=1, keys=4000, granule=128, kind="narrow", mode="shard", tie_break="high"),
    replace(RADIX, world=4, k=64, rows=3, keys=900, granule=1, kind="clustered", mode="all", dtype="bf16"),
    replace(RADIX, world=8, k=16, rows=3, keys=900, granule=128, kind="all nan", mode="all", order="index"),
    replace(SPLIT, world=3, k=300, rows=4, keys=2000, granule=64, kind="some nan", tie_break="high"),
]
WIDE = [
    replace(SPLIT, world=2, k=512, rows=3, keys=1500, granule=0, kind="infinities", order="index"),
    replace(RADIX, world=8, k=512, rows=16, keys=6000, granule=64, kind="relu", mode="owner", order="index"),
    replace(RADIX, world=3, k=1024, rows=64, keys=5000, granule=1, kind="rising"),
    replace(RADIX, world=2, k=2048, rows=17, keys=30000, granule=64, kind="levels", mode="shard"),
    replace(RADIX, world=4, k=2048, rows=3, keys=131071, granule=1, kind="normal"),
    replace(RADIX, world=2, k=16, rows=1, keys=1 << 20, granule=128, kind="narrow", order="index"),
    replace(SPLIT, world=8, k=2048, rows=16, keys=40000, granule=64, kind="relu"),
    replace(SPLIT, world=4, k=1024, rows=16, keys=9000, granule=1, kind="levels", order="index"),
]


@pytest.mark.parametrize("case", [*PAIRWISE, *(pytest.param(case, marks=pytest.mark.full) for case in WIDE)], ids=name)
def test_equals_one_rank_with_all_scores(case: Case):
    cases = [*several(case, 4), replace(case, lengths="all"), replace(case, lengths="zero")]
    run(case.world, check_all, cases, **case.options)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["all", "shard", "owner", "split"])
@pytest.mark.parametrize("k", [16, 512])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_every_kind_of_scores(world, k, mode):
    case = replace(RADIX, world=world, k=k, keys=4 * world * k + 1, mode=mode, granule=64)
    if mode == "split":
        case = replace(case, mode="all", algo="split", k=max(65, k))
    cases = [replace(case, kind=kind, seed=seed) for seed, kind in enumerate(oracle.KINDS)]
    run(world, check_all, cases, **case.options)


@pytest.mark.parametrize(("mode", "order"), [("all", "score"), ("owner", "index")])
def test_more_rows_than_blocks(mode, order):
    """Five blocks: each does up to eight rows, one after the other, with other epochs in each."""
    case = Case(world=3, k=12, rows=37, keys=150, mode=mode, order=order)
    cases = [*several(case, 2), replace(case, rows=3, algo="radix"), *several(case, 2)]
    run(3, check_all, cases, topk=(5, 12))


@pytest.mark.parametrize("given", [True, pytest.param(False, marks=pytest.mark.full)], ids=["given", "scores"])
def test_candidates_of_another_kernel_and_local_lengths(given):
    case = Case(world=3, k=40, rows=5, keys=900, granule=64, given=given, local_lengths=True, algo="radix")
    run(3, check_all, several(case, 2), **case.options)


@pytest.mark.parametrize("keys", [5000, pytest.param(400, marks=pytest.mark.full)])
def test_forced_keys_with_the_lowest_scores(keys):
    case = Case(world=2, k=8, rows=10, keys=keys, granule=64, kind="rising", forced=(2, 1), algo="radix")
    run(2, check_all, several(case, 2), **case.options)


def test_several_modes_and_ks_use_one_channel():
    """What one call leaves behind is nothing to the next: every word that was pushed was taken, and zeroed."""
    case = Case(world=3, k=50, rows=4, keys=300, algo="radix")
    modes = [("all", 50), ("owner", 7), ("shard", 50), ("owner", 50), ("all", 3), ("owner", 50)]
    cases = [replace(case, mode=mode, k=k, seed=seed) for seed, (mode, k) in enumerate(2 * modes)]
    run(3, _calls, cases, 1, **case.options)


def test_split_and_owner_use_one_channel():
    case = Case(world=3, k=70, rows=4, keys=300, algo="split")
    cases = several(case, 3) + several(replace(case, mode="owner", algo="push"), 2)
    run(3, _calls, [*cases, *cases[:2], *cases[3:], *cases], 0, **case.options)


@pytest.mark.full
def test_a_result_that_rests_until_its_tag_comes_again():
    """510 calls of one row: the owner shares its result in the first, keeps it in the others, and shares again."""
    case = Case(world=2, k=70, rows=1, keys=200, algo="split")
    kept = replace(case, mode="owner", algo="push")
    cases = [replace(kept if turn % 510 else case, seed=turn) for turn in range(2 * 510 + 1)]
    run(2, check_all, cases, **case.options)


def _calls(comm, cases, late=-1):
    for case in cases:
        if comm.rank == late:
            time.sleep(0.002)
        check(comm, case)


@pytest.mark.full
def test_rows_that_rest_until_their_tag_comes_again():
    """16 rows, 255 calls of 1 row, 16 rows; one rank is late."""
    case = Case(world=2, k=4, rows=16, keys=90, algo="radix")
    cases = [replace(case, rows=count, seed=seed) for seed, count in enumerate([16, *[1] * 255, 16])]
    run(2, _calls, cases, 1, **case.options)


@pytest.mark.slow
def test_a_list_that_rests_until_its_tag_comes_again():
    """No more keys than k, so a call is a round; "shard" has no list. One of 254 others has none until its tag."""
    case = Case(world=2, k=64, rows=4, keys=60, kind="normal", lengths="all", algo="radix")
    cases = [replace(case, mode="all" if turn % 255 == 0 else "shard", seed=turn) for turn in range(2 * 255 + 1)]
    run(2, check_all, cases, **case.options)


@pytest.mark.slow
def test_the_owner_of_the_only_row_is_the_slowest():
    case = Case(world=3, k=8, rows=1, keys=60, mode="owner", algo="radix")
    run(3, _calls, several(case, 60), 0, **case.options)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("algo", "k", "calls"), [("radix", 8, 10_000), ("split", 70, 1_000)])
def test_many_calls_of_varying_rows(algo, k, calls):
    rng = np.random.default_rng(3)
    case = Case(world=2, k=k, rows=16, keys=2 * k, algo=algo)
    cases = [replace(case, rows=int(rng.integers(1, 17)), seed=seed % 50) for seed in range(calls)]
    run(2, check_all, cases, patience=1800.0, **case.options)


@pytest.mark.parametrize(
    ("algo", "epoch"),
    [
        ("radix", 0xFFFFFFF0),
        ("split", 248),
        pytest.param("radix", 248, marks=pytest.mark.full),
        pytest.param("split", 0xFFFFFFF0, marks=pytest.mark.full),
    ],
)
def test_epochs_wrap(algo, epoch):
    """Several to a call, so the wrap falls between the rounds of one."""
    case = Case(world=2, k=70, rows=2, keys=200, mode="all", algo=algo)

    def body(comm):
        comm._session.channels.reset(epoch=epoch)
        comm._session.world.barrier()
        check_all(comm, several(case, 16))

    run(2, body, **case.options)


@pytest.mark.parametrize(
    "case", [replace(RADIX, world=3, mode="owner"), replace(SPLIT, world=3)], ids=["radix", "split"]
)
def test_a_late_rank_is_waited_for(case):
    def body(comm):
        for late, one in enumerate(several(case, 4)):
            if comm.rank == late % 3:
                time.sleep(0.05)
            check(comm, one)

    run(3, body, **case.options)


@pytest.mark.parametrize("case", [replace(RADIX, world=3), replace(SPLIT, world=3)], ids=["radix", "split"])
def test_a_missing_peer_ends_in_a_timeout_and_recover_helps(case):
    def body(comm):
        check(comm, case)
        comm._session.synchronize()
        comm._session.world.barrier()
        record = None
        if comm.rank != 1:
            scores, ids, counts = call(comm, replace(case, seed=1))
            comm._session.synchronize()
            assert np.isnan(scores).any()
            assert (ids[counts < 0] == -1).all()
            assert (counts < 0).any()
            with pytest.raises(CommTimeout) as caught:
                comm.check()
            record = caught.value.record
            assert record.phase in ("candidate", "token")
            assert record.reason == "abort" or (record.reason, record.peer) == ("timeout", 1)
        comm._session.world.barrier()
        comm.recover()
        check_all(comm, several(case, 3))
        return record

    records = run(3, body, timeout=0.3, **case.options)
    found = {(record.reason, record.peer) for record in records if record is not None}
    assert ("timeout", 1) in found


@pytest.mark.parametrize("case", [replace(RADIX, k=70), SPLIT], ids=["radix", "split"])
def test_other_arguments_on_another_rank_are_found(case):
    def body(comm):
        call(comm, replace(case, k=case.k + comm.rank))
        comm._session.synchronize()
        comm._session.world.barrier()
        with pytest.raises(CommTimeout) as caught:
            comm.check()
        return caught.value.record.reason

    assert "mismatch" in run(2, body, timeout=1.0, **case.options)


@pytest.mark.parametrize(
    ("algo", "mode", "k"),
    [
        ("push", "all", 20),
        ("radix", "all", 20),
        pytest.param("push", "shard", 90, marks=pytest.mark.full),
        pytest.param("split", "all", 90, marks=pytest.mark.full),
        pytest.param("radix", "owner", 90, marks=pytest.mark.full),
    ],
)
def test_how_a_rank_reads_its_scores_does_not_show_on_the_wire(algo, mode, k):
    """Other numbers of columns, alignments and sources on each rank: other kernels, one protocol. All ranks have made a
    call from either source before: ranks of one process load kernels together."""
    case = Case(world=3, k=k, rows=2, keys=360, granule=0, mode=mode, kind="levels", lengths="all", algo=algo)
    forms = [replace(case, wide=False), replace(case, given=True), case]

    def body(comm):
        check_all(comm, [replace(form, seed=9) for form in forms[1:]])
        for turn in range(3):
            check(comm, replace(forms[(comm.rank + turn) % 3], seed=turn))

    run(3, body, **case.options)


@pytest.mark.parametrize("algo", ["radix", pytest.param("push", marks=pytest.mark.full)])
def test_a_rank_may_have_more_columns_than_registers_hold(algo):
    def body(comm):
        columns = (30, 3000, 0)[comm.rank]
        scores = torch.arange(float(columns), device=comm.device)[None] + 5000 * (comm.rank == 0)
        own = torch.tensor([columns], dtype=torch.int32, device=comm.device)
        layout = ShardLayout(3, 4000)
        return comm.topk_exchange(scores, own, 40, layout=layout, local_lengths=True, algo=algo).ids[0].tolist()

    want = [*range(29, -1, -1), *range(4000 + 2999, 4000 + 2989, -1)]
    assert run(3, body, **Case(k=40).options) == [want] * 3


def test_an_id_that_a_rank_gives_twice_ends_all_the_same():
    """What the ranks get means nothing, but it is the same, and the next call is right."""
    case = Case(world=2, k=16, algo="radix")

    def body(comm):
        best = torch.ones(1, 16, device=comm.device)
        twice = comm.topk_exchange(best, None, 16, ids=torch.zeros_like(best, dtype=torch.int32), algo="radix")
        check_all(comm, several(case, 2))
        return twice.ids.tolist()

    left, right = run(2, body, **case.options)
    assert left == right


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"algo": "sort"}, "algo='sort' is not one of auto, push, split, radix"),
        ({"algo": "split"}, "with k=8 is not mode='all' with a k over 64"),
        ({"algo": "split", "k": 65, "mode": "shard"}, "mode='shard' with k=65"),
        ({"algo": "radix", "k": 65}, r"over the 0 that .* pass topk=\(2, 65\) to init"),
        ({"algo": "push", "scores": torch.zeros(5, 4)}, r"over the 4 that .* or algo='radix'"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(change, says):
    def body(comm):
        arguments = {"scores": torch.zeros(2, 80), "lengths": None, "k": 8} | change
        arguments["scores"] = arguments["scores"].to(comm.device)
        with pytest.raises(UsageError, match=says):
            comm.topk_exchange(**arguments)

    run(2, body, topk=(4, 8))
