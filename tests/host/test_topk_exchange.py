# SPDX-License-Identifier: Apache-2.0
"""The top-k exchange against one rank with all scores: exact ids on every rank, whoever is late."""

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
from tests.ranks import run, sample

# Every two values of two parameters meet, or nearly: each case is several calls with other lengths, and compiles once.
PAIRWISE = [
    Case(world=1, k=1, rows=1, keys=40, kind="levels", mode="all"),
    Case(world=1, k=64, rows=17, keys=500, granule=64, kind="some nan", mode="shard", order="index"),
    Case(world=1, k=512, rows=3, keys=1500, kind="narrow", mode="owner", tie_break="high"),
    Case(world=2, k=1, rows=4, keys=257, granule=64, kind="constant", mode="owner", order="index"),
    Case(world=2, k=16, rows=3, keys=1000, granule=1, kind="infinities", mode="shard", tie_break="high"),
    Case(world=2, k=64, rows=16, keys=700, granule=0, kind="relu", mode="all", dtype="bf16"),
    Case(world=2, k=600, rows=1, keys=3000, granule=128, kind="levels", mode="all", order="index"),
    Case(world=3, k=16, rows=17, keys=500, granule=1, kind="zeros", mode="owner", tie_break="high", dtype="f16"),
    Case(world=3, k=64, rows=1, keys=800, granule=128, kind="denormals", mode="shard", order="index"),
    Case(world=3, k=300, rows=4, keys=2000, granule=0, kind="some nan", mode="all", tie_break="high"),
    Case(world=4, k=1, rows=16, keys=300, granule=0, kind="all -inf", mode="shard", wide=False),
    Case(world=4, k=64, rows=3, keys=900, granule=1, kind="clustered", mode="owner", order="index", tie_break="high"),
    Case(world=4, k=512, rows=2, keys=3000, granule=64, kind="constant", mode="shard"),
    Case(world=8, k=16, rows=3, keys=900, granule=128, kind="all nan", mode="all", order="index", wide=False),
    Case(world=8, k=64, rows=1, keys=2000, granule=1, kind="normal", mode="owner"),
]
WIDE = [
    Case(world=8, k=512, rows=16, keys=6000, granule=64, kind="relu", mode="owner", order="index"),
    Case(world=3, k=1024, rows=3, keys=9000, granule=1, kind="rising", mode="all"),
    Case(world=2, k=2048, rows=4, keys=30000, granule=64, kind="levels", mode="shard", order="index"),
    Case(world=4, k=2048, rows=1, keys=131071, granule=1, kind="normal", mode="all"),
    Case(world=4, k=64, rows=64, keys=3000, granule=128, kind="levels", mode="all"),
    Case(world=2, k=64, rows=64, keys=3000, granule=1, kind="relu", mode="owner"),
    Case(world=2, k=16, rows=2, keys=1 << 20, granule=128, kind="normal", mode="all"),
]


@pytest.mark.parametrize("case", [*PAIRWISE, *(pytest.param(case, marks=pytest.mark.full) for case in WIDE)], ids=name)
def test_equals_one_rank_with_all_scores(case: Case):
    cases = [*several(case, 4), replace(case, lengths="all"), replace(case, lengths="zero")]
    run(case.world, check_all, cases, **case.options)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["all", "shard", "owner"])
@pytest.mark.parametrize("k", [16, 512])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_every_kind_of_scores(world, k, mode):
    case = Case(world=world, k=k, keys=4 * world * k + 1, mode=mode, granule=64)
    cases = [replace(case, kind=kind, seed=seed) for seed, kind in enumerate(oracle.KINDS)]
    run(world, check_all, cases, **case.options)


def test_one_rank_gives_the_same_bits():
    case = Case(world=1, k=20, rows=3, keys=700, kind="levels", lengths="all")
    (alone,) = run(1, call, case, **case.options)
    for world in (2, 3):
        for found in run(world, call, replace(case, world=world), **case.options):
            assert all(np.array_equal(one, same) for one, same in zip(found, alone, strict=True))


def test_all_winners_on_one_rank():
    """Contiguous shares of rising scores: a rank that nominated k/P only would lose most of them."""
    case = Case(world=4, k=64, keys=1200, granule=0, kind="rising", lengths="all")
    run(4, check_all, several(case, 2), **case.options)


def test_the_best_of_a_rank_that_lie_apart():
    """In 64 parts of a block, mostly one in each of 16: who took one too few would be short of one in most rows."""
    case = Case(world=1, k=16, rows=16, keys=1000, kind="normal", lengths="all")
    run(1, check_all, several(case, 2), **case.options)


def test_scores_of_a_narrow_range_overflow_a_coarse_bin():
    """Thousands of scores in [1, 1.245) share sign, exponent and the first bits of the mantissa."""
    case = Case(world=2, k=512, rows=2, keys=6000, kind="narrow", lengths="all")
    run(2, check_all, several(case, 2), **case.options)


@pytest.mark.parametrize("given", [True, False], ids=["given", "scores"])
def test_candidates_of_another_kernel_and_local_lengths(given):
    case = Case(world=3, k=40, rows=5, keys=900, granule=64, given=given, local_lengths=True, tie_break="high")
    run(3, check_all, several(case, 3), **case.options)


@pytest.mark.parametrize(
    ("k", "mode", "order", "algo"),
    [
        (40, "owner", "index", "push"),
        (300, "all", "score", "push"),
        pytest.param(600, "all", "index", "split", marks=pytest.mark.full),
        pytest.param(2048, "shard", "score", "push", marks=pytest.mark.full),
        pytest.param(2048, "all", "score", "push", marks=pytest.mark.full),
    ],
)
def test_candidates_of_another_kernel_in_any_order(k, mode, order, algo):
    """Rows with fewer keys than k have ids of -1 anywhere among the others."""
    case = Case(world=2, k=k, rows=5, keys=4 * k, granule=64, given=True, mode=mode, order=order, algo=algo)
    run(2, check_all, several(case, 2) + several(replace(case, shuffled=True), 2), **case.options)


@pytest.mark.parametrize(("mode", "granule"), [("all", 1), ("shard", 64), ("owner", 0)])
def test_forced_keys_with_the_lowest_scores(mode, granule):
    """The first two keys and the last one, in shorter rows too; rising scores, so 0 and 1 would be last."""
    case = Case(world=3, k=8, rows=10, keys=400, granule=granule, kind="rising", mode=mode, forced=(2, 1))
    falling = replace(case, kind="levels", order="index")
    run(3, check_all, several(case, 2) + several(falling, 2), **case.options)


def test_a_forced_key_precedes_infinite_scores():
    def body(comm):
        x = torch.full((1, 50), float("inf"), device=comm.device)
        lengths = torch.tensor([100], dtype=torch.int32, device=comm.device)
        return comm.topk_exchange(x, lengths, 3, forced=(0, 1), order="index").ids.tolist()

    case = Case(k=3)
    assert run(2, body, **case.options) == [[[0, 1, 99]]] * 2


def _calls(comm, cases, late=-1):
    for case in cases:
        if comm.rank == late:
            time.sleep(0.002)
        check(comm, case)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["owner", pytest.param("all", marks=pytest.mark.full)])
def test_rows_that_rest_until_their_tag_comes_again(mode):
    """16 rows, 255 calls of 1 row, 16 rows; then so many that a tag and the buffer are those of a call long ago."""
    case = Case(world=2, k=4, rows=16, keys=90, mode=mode)
    rows = [16, *[1] * 255, 16, *[1] * 509, 16, *[1] * 254, 16, *[1] * 254, 16]
    cases = [replace(case, rows=count, seed=seed) for seed, count in enumerate(rows)]
    run(2, _calls, cases, 1, **case.options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "calls"),
    [(2, 150), (3, 150), pytest.param(2, 10_000, marks=[pytest.mark.full, pytest.mark.timeout(1800)])],
)
def test_the_owner_of_the_only_row_is_the_slowest(world, calls):
    """The other ranks have nothing to wait for but tokens."""
    case = Case(world=world, k=8, rows=1, keys=60, mode="owner")
    run(world, _calls, several(case, calls), 0, patience=1800.0, **case.options)


@pytest.mark.parametrize("epoch", [248, 0xFFFFFFF8])
def test_an_owner_that_is_slow_within_its_kernel(epoch):
    """All keys are its own, so the others have pushed two calls before it looks at the first; tags go round."""
    case = Case(world=3, k=8, rows=1, keys=18000, granule=0, mode="owner", lengths="first")

    def body(comm):
        comm._session.channels.reset(epoch=epoch)
        comm._session.world.barrier()
        check_all(comm, several(case, 12))

    run(3, body, **case.options)


@pytest.mark.slow
def test_an_owner_that_is_passed_over_until_its_tag_comes_again():
    case = Case(world=3, k=8, rows=1, keys=60, mode="owner", owners=(0,))
    owners = [0, 0, *[1] * 508, 0, 0, 2, 1, 0]
    cases = [replace(case, owners=(owner,), seed=seed) for seed, owner in enumerate(owners)]
    run(3, _calls, cases, 2, **case.options)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["all", "owner"])
def test_rows_k_and_lengths_change_from_call_to_call(mode):
    rng = np.random.default_rng(3)
    case = Case(world=3, k=64, rows=16, keys=200, mode=mode)
    cases = [replace(case, rows=int(rng.integers(1, 17)), k=int(rng.integers(1, 65)), seed=seed) for seed in range(120)]
    run(3, _calls, cases, 1, **case.options)


@pytest.mark.parametrize("mode", ["all", "owner"])
def test_epochs_wrap(mode):
    case = Case(world=2, k=4, rows=2, keys=90, mode=mode)

    def body(comm):
        comm._session.channels.reset(epoch=0xFFFFFFF0)
        comm._session.world.barrier()
        check_all(comm, several(case, 30))

    run(2, body, **case.options)


@pytest.mark.parametrize("mode", ["all", "shard", "owner"])
def test_a_late_rank_is_waited_for(mode):
    case = Case(world=3, k=8, rows=3, keys=90, mode=mode)

    def body(comm):
        for late, one in enumerate(several(case, 6)):
            if comm.rank == late % 3:
                time.sleep(0.05)
            check(comm, one)

    run(3, body, **case.options)


@pytest.mark.parametrize(("mode", "k"), [("all", 8), ("owner", 8), ("shard", 300)])
def test_a_missing_peer_ends_in_a_timeout_and_recover_helps(mode, k):
    case = Case(world=3, k=k, rows=3, keys=90, mode=mode)

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
            assert record.reason in ("timeout", "abort")
            assert record.reason == "abort" or record.peer == 1
        comm._session.world.barrier()
        comm.recover()
        check_all(comm, several(case, 3))
        return record

    records = run(3, body, timeout=0.3, **case.options)
    assert any(record is not None and record.reason == "timeout" for record in records)


def test_other_arguments_on_another_rank_are_found_by_the_token():
    case = Case(world=2, k=8, rows=2, keys=90, mode="owner")

    def body(comm):
        call(comm, replace(case, k=8 + comm.rank))
        comm._session.synchronize()
        comm._session.world.barrier()
        with pytest.raises(CommTimeout) as caught:
            comm.check()
        return caught.value.record.reason

    assert "mismatch" in run(2, body, timeout=1.0, **case.options)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"k": 0}, "not in 1..2048"),
        ({"k": 3000}, "not in 1..2048"),
        ({"mode": "some"}, "mode='some'"),
        ({"order": "id"}, "order='id'"),
        ({"layout": ShardLayout(3)}, "over 3 ranks"),
        ({"layout": ShardLayout(2, 1 << 24)}, "over the 16777216 that a key holds"),
        ({"forced": (5, 4), "k": 8}, "at most k together"),
        ({"forced": (1, 0), "lengths": None}, "global lengths"),
        ({"owners": torch.zeros(2, dtype=torch.int32)}, "mode='owner'"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, r"lengths are \(3,\)"),
        ({"scores": torch.zeros(17, 4), "algo": "push"}, r"over the 16 that .* pass topk=\(17, 8\) to init"),
        ({"ids": torch.zeros(2, 40, dtype=torch.int64)}, "ids are"),
        ({"scores": torch.zeros(2, 4, dtype=torch.float64)}, "float64"),
        ({"scores": torch.zeros(4, 2).t()}, "2 elements apart"),
        ({"ids": torch.zeros(2, 4, dtype=torch.int32)}, "ids are"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(change, says):
    def body(comm):
        arguments = {"scores": torch.zeros(2, 40), "k": 8, "lengths": torch.zeros(2, dtype=torch.int32)} | change
        arguments = {
            key: one.to(comm.device) if isinstance(one, torch.Tensor) else one for key, one in arguments.items()
        }
        if "scores" in change:
            arguments["lengths"] = None
        with pytest.raises(UsageError, match=says):
            comm.topk_exchange(**arguments)

    run(2, body, **Case(k=8).options)


def test_the_op_its_fake_and_other_calls_in_between():
    def body(comm):
        scores = sample(comm, (3, 50), torch.float32, 4)
        lengths = torch.tensor([100, 7, 0], dtype=torch.int32, device=comm.device)
        want = comm.topk_exchange(scores, lengths, 8)
        comm.all_reduce(scores)
        got = torch.ops.flycomm.topk_exchange(scores, lengths, 8, comm.group_name)
        assert all(torch.equal(left, right) for left, right in zip(got, want, strict=True))
        assert want.counts.tolist() == [8, 7, 0]

    run(2, body, topk=(4, 8))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        best, ids, counts = torch.ops.flycomm.topk_exchange(torch.empty(3, 50), None, 8, "nobody")
        assert (best.shape, ids.shape, counts.shape) == ((3, 8), (3, 8), (3,))


def test_without_channels_it_says_how_to_have_them():
    def body(comm):
        with pytest.raises(UsageError, match=r"over the 0 that this communicator .* pass topk=\(2, 8\) to init"):
            comm.topk_exchange(torch.zeros(2, 40, device=comm.device), None, 8)

    run(2, body)
    with pytest.raises(UsageError, match=r"topk=\(100, 8\) is not 1..64 rows"):
        run(1, lambda comm: None, topk=(100, 8))


def test_ids_that_two_ranks_nominate_end_all_the_same():
    """Ranks that disagree about the layout: what they get means nothing, but they get it, and the next is right."""

    def body(comm):
        same = torch.zeros(1, 600, device=comm.device)
        for k in (300, 301):  # the last of the best is one of two that are alike, in one of these
            comm.topk_exchange(same, None, k, layout=ShardLayout(2, 1 if comm.rank == 0 else 16), order="index")
        best, ids, _ = comm.topk_exchange(torch.arange(600.0, device=comm.device)[None] + 1000 * comm.rank, None, 300)
        assert ids[0, :3].tolist() == [1199, 1197, 1195]
        return best.cpu()

    left, right = run(2, body, topk=(1, 512), max_bytes=32 << 20, timeout=5.0)
    assert torch.equal(left, right)
