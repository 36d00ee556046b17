# SPDX-License-Identifier: Apache-2.0
"""The indexer in one launch: the bits of ``IndexerCP.decode``, of one rank that scores everything, and a projection."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from flycomm.channel import MAX_WORLD, SIGNAL_BYTES, signal_offset
from flycomm.epoch import EPOCH_LAST
from flycomm.errors import CommTimeout, UsageError
from flycomm.indexer import IndexScores
from flycomm.kernels.mono_indexer import slot_bytes
from flycomm.mono import IndexerLayer
from tests import indexer_oracle as oracle
from tests.indexer_oracle import BLOCKS, TOKENS, Case
from tests.ranks import run, same_bits, settle

THREADS = 64
INNER, OUT = 64, 48
FORMATS = {"dsa": "e4m3fn", "block_max": "bf16"}
SMALL = replace(Case(), seq_lens=(200, 65, 0), queries=(2, 1, 1), padding=1, most=256, width=128)
OF_TOKENS = replace(SMALL, indexer=TOKENS, heads=16)
OF_BLOCKS = replace(SMALL, indexer=BLOCKS, page=128, granule=128, seq_lens=(600, 130, 0), queries=(1, 2, 0), most=640)
LONG = replace(OF_TOKENS, granule=64, cache="replicated", seq_lens=(2300, 700, 65), most=2560)
MANY = replace(OF_TOKENS, indexer=replace(TOKENS, k=100), seq_lens=(230, 65, 0))


def blocks_of(case):
    """One for each list, and more, which score and project only."""
    return max(17, case.rows * case.indexer.lists + 1)


def indexed(case, body, blocks=None, threads=THREADS, math="auto", **options):
    """``body(layer, comm)`` on every rank; the results in rank order."""
    blocks = blocks or blocks_of(case)
    math = "f32" if threads % 128 else math  # else scores are by groups of so many threads

    def rank(comm):
        scorer = IndexScores(comm, case.indexer, FORMATS[case.indexer.kind], case.heads, case.page, math=math)
        indexer = oracle.made(comm, case, scorer)
        return body(IndexerLayer(comm, "indexer", indexer, INNER, OUT, threads), comm)

    channels = {"indexer": (blocks, slot_bytes(blocks, case.indexer.k))}
    return run(case.world, rank, kernel_channels=channels, **(case.beside(blocks) | options))


def inputs(comm, case):
    x = oracle.packed(oracle.inputs(comm, case), FORMATS[case.indexer.kind])
    generator = torch.Generator().manual_seed(100 * case.seed + comm.rank)
    for name, shape in (("x", (case.rows, INNER)), ("projection", (OUT, INNER))):
        x[name] = torch.randint(-3, 4, shape, generator=generator).bfloat16().to(comm.device)
    return x


def call(layer, comm, case, x=None):
    """Scores, ids, counts and the projection of a step."""
    x = x or inputs(comm, case)
    plan = layer.indexer.plan(x["seq_lens"], x["ends"], case.rows)
    found, projected = layer(x["q"], x["weights"], x["cache"], x["table"], plan, x["x"], x["projection"])
    return (*found, projected)


def projection_of(x):
    """Of whole numbers, so every sum is exact."""
    return (x["x"].double() @ x["projection"].double().T).bfloat16()


def check(layer, comm, case, decode=True):
    """Equal to the bit to one rank that scores everything, to ``decode``, and to the projection."""
    x = inputs(comm, case)
    found = call(layer, comm, case, x)
    comm.check()
    assert same_bits(found[3], projection_of(x))
    wanted = oracle.expected(case, comm.rank)
    if case.whole:
        for name, one, want in zip(("scores", "ids", "counts"), found, wanted, strict=False):
            assert np.array_equal(one.cpu().numpy().view(np.uint32), want.view(np.uint32)), (comm.rank, case, name)
    if decode:
        plan = layer.indexer.plan(x["seq_lens"], x["ends"], case.rows)
        decoded = layer.indexer.decode(x["q"], x["weights"], x["cache"], x["table"], plan)
        assert all(same_bits(one, same) for one, same in zip(found, decoded, strict=False))
    return [one.cpu() for one in found]


def check_all(cases, layer, comm, decode=True):
    return [check(layer, comm, case, decode) for case in cases]


# Every two values of two parameters meet, or nearly.
PAIRWISE = [
    replace(OF_BLOCKS, world=1),
    replace(MANY, world=2, granule=1, mode="shard", tie_break="high"),
    replace(OF_BLOCKS, world=3, mode="owner", order="index", whole=False),
    replace(OF_TOKENS, world=4, mode="owner"),
]
WIDE = [
    replace(OF_BLOCKS, world=4, cache="replicated", queries=(4, 8, 4), padding=0),
    replace(OF_TOKENS, world=3, granule=128, queries=(4, 8, 4), padding=0, order="index", whole=False),
    replace(OF_BLOCKS, world=2, cache="replicated"),
    replace(MANY, world=4, cache="replicated", mode="owner", order="index"),
    replace(LONG, world=3, indexer=replace(TOKENS, k=300), mode="owner", order="index", whole=False),
    replace(LONG, world=1, tie_break="high"),
    replace(LONG, world=3, indexer=replace(TOKENS, forced=(2, 5)), granule=1, cache="sharded", mode="shard"),
    replace(MANY, world=3, indexer=replace(TOKENS, k=2048), seq_lens=(5999, 2048, 77), most=6016, heads=64),
    replace(MANY, world=2, indexer=replace(TOKENS, k=1000), seq_lens=(5999, 2048, 77), most=6016, mode="shard"),
]


def threads_of(case):
    return 256 if case.indexer.k > 512 else THREADS


@pytest.mark.parametrize(
    "case",
    [*PAIRWISE, *(pytest.param(case, marks=pytest.mark.full) for case in WIDE)],
    ids=lambda one: f"{one.indexer.kind}-{one.indexer.k}-{one.world}-{one.mode}",
)
def test_equals_decode_and_one_rank_that_scores_everything(case):
    decode = not case.whole or case in WIDE
    indexed(case, partial(check_all, oracle.several(case, 2), decode=decode), threads=threads_of(case))


@pytest.mark.full
def test_scores_by_groups_of_four_warps():
    for case in (replace(OF_TOKENS, world=2, whole=False), replace(LONG, world=2)):
        indexed(case, partial(check_all, oracle.several(case, 2)), threads=128, math="fp8")


def test_long_rows_are_listed_by_all_blocks():
    """More blocks than steps of keys in the shorter sequences: some have no run of them."""
    indexed(LONG, lambda layer, comm: check(layer, comm, LONG, decode=False))


def test_winners_that_lie_in_one_run_are_found_again():
    """Scores rise with the position, so a block has listed fewer than it has of the best."""
    case = replace(LONG, indexer=replace(TOKENS, k=60))

    def body(layer, comm):
        x = inputs(comm, case)
        x["q"] = torch.ones_like(x["q"])
        x["weights"] = torch.ones_like(x["weights"])
        x["cache"][:, : 64 * 128] = 0x38  # 1.0
        place = torch.arange(40, device=comm.device)[:, None] * 64 + torch.arange(64, device=comm.device)
        for pages in x["table"].long():
            x["cache"][pages, 64 * 128 :] = (place + 1.0).view(torch.uint8)
        found = call(layer, comm, case, x)
        comm.check()
        assert found[1][0].tolist() == list(range(2298, 2238, -1))
        plan = layer.indexer.plan(x["seq_lens"], x["ends"], case.rows)
        decoded = layer.indexer.decode(x["q"], x["weights"], x["cache"], x["table"], plan)
        assert all(same_bits(one, same) for one, same in zip(found, decoded, strict=False))

    indexed(case, body)


def test_repeats_late_ranks_and_steps_of_fewer_rows():
    """Lists rest and come back, with other keys; what is left of an earlier step is another step's."""
    case = replace(OF_BLOCKS, cache="replicated")
    fewer = replace(case, queries=(0, 1, 0), padding=0, seed=8)
    steps = [case, fewer, fewer, replace(case, seed=9), replace(fewer, seed=10), case]

    def body(layer, comm):
        found = []
        for turn, one in enumerate(steps):
            if comm.rank == turn % 2:
                time.sleep(0.02)
            found.append(check(layer, comm, one, decode=False))
        assert all(same_bits(one, same) for one, same in zip(found[0], found[-1], strict=True))

    indexed(case, body)


@pytest.mark.parametrize("epoch", [248, EPOCH_LAST - 4])
def test_epochs_and_tags_wrap(epoch):
    case = replace(OF_BLOCKS, world=3, mode="owner", order="index")
    fewer = replace(case, queries=(1, 0, 0), padding=0)

    def body(layer, comm):
        comm._session.channels.reset(epoch=epoch)
        layer.scratch.view(torch.int32).fill_(epoch - (1 << 32) if epoch >> 31 else epoch)
        settle()
        comm._session.world.barrier()  # of the host: a peer that is early would push into slots that are yet reset
        for seed in range(10):
            check(layer, comm, replace(fewer if seed % 3 else case, seed=seed), decode=False)

    indexed(case, body)


@pytest.mark.parametrize("held", [0, 5], ids=["never", "once"])
def test_a_list_that_has_not_been_used_for_half_a_cycle(held):
    """Its token words, all but those of block 0, are of a launch long ago, or of none: not of one ahead."""
    case, epoch = replace(OF_BLOCKS, world=2, mode="owner"), (1 << 31) + 20

    def body(layer, comm):
        channels, device = comm._session.channels, comm._session.world.device
        channels.reset(epoch=epoch)
        layer.reset()
        slot = next(slot for slot in channels.layout.slots if slot.key.wire == "kernel:indexer")
        words = (held | layer._tag << 32).to_bytes(SIGNAL_BYTES, "little") * (MAX_WORLD * (slot.signal_rows - 1))
        address = channels.buffer.local_address + slot.offset + signal_offset(1, 0)
        comm._session.target.memory.write(address, words, device)
        settle()
        comm._session.world.barrier()
        for seed in range(2):
            check(layer, comm, replace(case, seed=seed), decode=False)

    indexed(case, body)


def test_a_forced_block_with_the_lowest_score_and_a_rank_without_tokens():
    """Blocks score by their best token: the last one, of one token, is the lowest of many."""
    forced = replace(BLOCKS, k=2, forced=(1, 1))
    case = replace(OF_BLOCKS, indexer=forced, seq_lens=(385, 257, 1), queries=(1, 1, 1), padding=0, most=640)

    def body(layer, comm):
        found = check(layer, comm, case, decode=False)
        assert found[1][:4].tolist() == [[0, 3]] * 4
        assert found[2][::4].tolist() == [2, 2, 1]
        check(layer, comm, replace(case, seq_lens=(128, 3, 1)), decode=False)  # rank 1 has no token
        check(layer, comm, replace(case, seq_lens=(0, 0, 0)), decode=False)

    indexed(case, body)


@pytest.mark.parametrize("case", [replace(OF_BLOCKS, world=3, mode="owner", order="index")], ids=["owner"])
def test_a_missing_rank_ends_in_a_timeout_and_recover_helps(case):
    def body(layer, comm):
        check(layer, comm, case, decode=False)
        comm._session.world.barrier()
        if comm.rank != 1:
            x = inputs(comm, replace(case, seed=1))
            scores, ids, counts, projected = call(layer, comm, case, x)
            settle()
            with pytest.raises(CommTimeout) as caught:
                comm.check()
            assert caught.value.record.phase in ("candidate", "token", "ready")
            assert (counts < 0).all()
            assert (ids == -1).all()
            assert scores.isnan().all()
            assert same_bits(projected, projection_of(x))
        comm._session.world.barrier()
        comm.recover()
        comm._session.world.barrier()
        check_all(oracle.several(case, 2), layer, comm, decode=False)

    indexed(case, body, timeout=0.3)


def test_what_a_failed_wait_leaves_is_right_or_nothing():
    """A limit so short that whoever does not find what he waits for gives up."""
    case = replace(OF_BLOCKS, cache="replicated")

    def body(layer, comm):
        failed = 0
        for seed in range(12):
            step = replace(case, seed=seed % 3)
            x = inputs(comm, step)
            if comm.rank == seed % 3:
                time.sleep(0.01)
            found = call(layer, comm, step, x)
            settle()
            assert same_bits(found[3], projection_of(x))
            scores, ids, counts = (one.cpu().numpy() for one in found[:3])
            bad = counts < 0
            assert np.isnan(scores[bad]).all()
            assert (ids[bad] == -1).all()
            for one, want in zip((scores, ids, counts), oracle.expected(step, 0), strict=True):
                assert np.array_equal(one[~bad], want[~bad])
            failed += int(bad.any())
            comm._session.world.barrier()
            comm.recover()
            comm._session.world.barrier()
        return failed

    assert sum(indexed(case, body, timeout=1e-9)) > 0


def test_what_cannot_be_is_refused_in_a_sentence():
    case = replace(OF_BLOCKS, cache="replicated", parallel=None)

    def body(comm):
        scorer = IndexScores(comm, BLOCKS, "bf16", case.heads, case.page)
        parallel = oracle.made(comm, replace(case, parallel=True), scorer)
        for indexer, channel, says in (
            (oracle.made(comm, case, scorer), "indexer", "make it with parallel=True"),
            (oracle.made(comm, replace(case, parallel=True)), "indexer", "no kernel's"),
            (parallel, "few", "a block for each list"),
            (parallel, "narrow", "channel 'narrow' has 4096 bytes"),
        ):
            with pytest.raises(UsageError, match=says):
                IndexerLayer(comm, channel, indexer, INNER, OUT, THREADS)
        for arguments, says in (((60, OUT, THREADS), "from 60 to 48"), ((INNER, OUT, 96), "a block of 96 threads")):
            with pytest.raises(UsageError, match=says):
                IndexerLayer(comm, "indexer", parallel, *arguments)

    channels = {"indexer": (17, slot_bytes(17, 3)), "few": (8, slot_bytes(8, 3)), "narrow": (17, 1024)}
    run(2, body, kernel_channels=channels, **case.beside(17 + 8 + 17))


def test_a_plan_of_another_kind_is_refused():
    case = replace(OF_BLOCKS, cache="replicated")

    def body(layer, comm):
        x = inputs(comm, case)
        plan = layer.indexer.plan(x["seq_lens"], x["ends"], case.rows)
        rest = (x["q"], None, x["cache"], x["table"])
        with pytest.raises(UsageError, match="alone=True"):
            layer(*rest, replace(plan, alone=True), x["x"], x["projection"])
        with pytest.raises(UsageError, match="x is"):
            layer(*rest, plan, x["x"].float(), x["projection"])
        with pytest.raises(UsageError, match="block table is of 1"):
            layer(*rest[:3], x["table"][:1], plan, x["x"], x["projection"])

    indexed(case, body)
