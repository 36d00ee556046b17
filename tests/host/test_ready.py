# SPDX-License-Identifier: Apache-2.0
"""Ready marks between the blocks of a grid: what was stored before a mark is read after a wait, and waits end."""

from contextlib import contextmanager
from functools import cache

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
import torch

import flycomm.primitives as fc
from flycomm import targets
from flycomm.epoch import EPOCH_LAST
from flycomm.errors import CommTimeout
from flycomm.kernels import Specialization, compiled, null_pointer, peers_placeholder
from flycomm.primitives import ready
from flycomm.primitives.access import load_element, load_relaxed, store_element
from flycomm.primitives.call import advance
from tests.ranks import run

BLOCKS, THREADS, PHASES = 3, 64, 2
WORDS = PHASES * BLOCKS * THREADS
MARKS = PHASES * BLOCKS + 1  # the last one is nobody's
HALF = 1 << 31  # of a word


@flyc.jit
def _dawdle(late, address):
    if late:
        turns = fx.Int32(0)
        while turns < fx.Int32(100):
            turns = turns + fx.Int32(1) + fx.Int32(load_relaxed(address) >> fx.Uint64(63))


@cache
def specialization():
    """Two phases: every block stores a tile made of all tiles of the phase before, marks it, waits for all."""

    def build(world, dtype, blocks, threads):
        peers = fc.peers_type(world, blocks)

        @flyc.kernel(known_block_size=[threads, 1, 1])
        def phases(
            comm: peers,
            writes: fx.Int64,
            reads: fx.Int64,
            out: fx.Pointer,
            salt: fx.Int32,
            late: fx.Int32,
            first: fx.Int32,
            count: fx.Int32,
        ):
            block, thread = fx.Int32(fx.block_idx.x), fx.Int32(fx.thread_idx.x)
            call = fc.begin(comm)
            total, ok = salt, call.live
            for phase in fx.range_constexpr(PHASES):
                _dawdle((block == late) & (thread >= fx.Int32(threads // 2)), reads)
                mine = (fx.Int32(phase * blocks) + block) * fx.Int32(threads) + thread
                value = total * fx.Int32(3) + mine
                store_element(writes + fx.Int64(mine) * fx.Int64(4), value)
                ready.mark(call, writes + fx.Int64(4 * WORDS), fx.Int32(phase * blocks) + block)
                mixed = (block == fx.Int32(0)) & (fx.Int32(phase) == fx.Int32(0))
                ok = ready.wait(
                    call,
                    reads + fx.Int64(4 * WORDS),
                    mixed.select(first, fx.Int32(phase * blocks)),
                    mixed.select(count, fx.Int32(blocks)),
                )
                total = fx.Int32(0)
                for other in fx.range_constexpr(blocks):
                    theirs = fx.Int32((phase * blocks + other + 1) * threads - 1) - thread  # another wave's
                    total = total + load_element(reads + fx.Int64(theirs) * fx.Int64(4), fx.Int32)
            place = fx.Int64(block * fx.Int32(threads) + thread)
            store_element(fx.Int64(fx.ptrtoint(out)) + place * fx.Int64(4), ok.select(total, fx.Int32(-1)))
            advance(call)
            fc.finish(call)

        @flyc.jit
        def launch(
            comm: peers,
            writes: fx.Int64,
            reads: fx.Int64,
            out: fx.Pointer,
            salt: fx.Int32,
            late: fx.Int32,
            first: fx.Int32,
            count: fx.Int32,
            stream: fx.Stream,
        ):
            phases(comm, writes, reads, out, salt, late, first, count).launch(
                grid=(blocks,), block=(threads,), stream=stream
            )

        return launch, (
            *(peers_placeholder(world, blocks), 0, 0, null_pointer(fx.Int32, 4), 0, 0, 0, 0, fx.Stream(None)),
        )

    return Specialization("ready_phases", build, 1, "", BLOCKS, THREADS)


@contextmanager
def shared_words():
    """Addresses to write and to read the same words, and functions that set and get a mark.

    On the host target the writer's is a mapping of its own, like a peer's: there the weak mode keeps stores back.
    """
    target = targets.active()
    if target.name == "host":
        memory = target.memory
        own = memory.allocate(4 * (WORDS + MARKS), 0)
        remote = memory.open(memory.export(own, 0), 0)
        memory.export_done(own, 0)
        marks = own + 4 * WORDS
        yield (
            remote,
            own,
            lambda i, epoch: memory.write(marks + 4 * i, epoch.to_bytes(4, "little"), 0),
            lambda i: int.from_bytes(memory.read(marks + 4 * i, 4, 0), "little"),
        )
        memory.close(remote, 0)
        memory.free(own, 0)
    else:
        words = torch.zeros(WORDS + MARKS, dtype=torch.int32, device=target.runtime.torch_device_type)

        def set_mark(i, epoch):
            words[WORDS + i] = epoch - (1 << 32) * (epoch >> 31)

        yield words.data_ptr(), words.data_ptr(), set_mark, lambda i: int(words[WORDS + i])


def expected(salt):
    total = torch.full((BLOCKS, THREADS), salt, dtype=torch.int32)
    index = torch.arange(WORDS, dtype=torch.int32).view(PHASES, BLOCKS, THREADS)
    for phase in range(PHASES):
        total = (total * 3 + index[phase]).flip(1).sum(0, dtype=torch.int32).expand(BLOCKS, THREADS)
    return total


def launch(comm, words, salt, late=BLOCKS, first=0, count=BLOCKS):
    out = torch.zeros(BLOCKS, THREADS, dtype=torch.int32, device=comm.device)
    kernel = compiled(specialization())
    kernel(comm.peers("phases"), *words[:2], out.data_ptr(), salt, late, first, count, comm.stream())
    targets.active().runtime.synchronize(0)
    return out.cpu()


def alone(body, **options):
    return run(1, body, kernel_channels={"phases": (BLOCKS, 4096)}, **options)


def test_what_was_marked_is_read_launch_after_launch():
    def body(comm):
        with shared_words() as words:
            for salt in range(12):
                assert torch.equal(launch(comm, words, salt, late=salt % (BLOCKS + 1)), expected(salt)), salt
                comm.check()

    alone(body)


def test_marks_follow_epochs_across_the_wrap():
    def body(comm):
        with shared_words() as words:
            comm._session.channels.reset(epoch=EPOCH_LAST - 4)
            for i in range(MARKS):
                words[2](i, EPOCH_LAST - 4)
            for salt in range(10):
                assert torch.equal(launch(comm, words, salt, late=salt % BLOCKS), expected(salt))
                comm.check()

    alone(body)


def test_a_mark_that_is_one_call_ahead_has_come():
    def body(comm):
        with shared_words() as words:
            for mark in (1, 3, 4):  # in calls 1, 2, 3
                words[2](MARKS - 1, mark)
                launch(comm, words, 5, first=MARKS - 1, count=1)  # block 0 does not wait for tiles: no sum to expect
                comm.check()

    alone(body)


@pytest.mark.parametrize("rests", [0, HALF + 9, EPOCH_LAST - 5], ids=["new", "half a cycle", "nearly one"])
def test_a_mark_that_has_rested_has_not_come(rests):
    """Nor has a new one, on a channel that has been used for long."""
    epoch = HALF + 5 if not rests else 2

    def body(comm):
        with shared_words() as words:
            comm._session.channels.reset(epoch=epoch)
            for i in range(MARKS):
                words[2](i, (epoch - rests - 1) % EPOCH_LAST + 1 if rests else 0)
            for salt in range(4):
                assert torch.equal(launch(comm, words, salt, late=salt % BLOCKS), expected(salt))
                comm.check()

    alone(body)


def test_a_wait_for_what_nobody_marks_ends_and_says_so():
    def body(comm):
        with shared_words() as words:
            assert torch.equal(launch(comm, words, 1), expected(1))
            words[2](MARKS - 1, 1)  # of the launch before: not of this one
            out = launch(comm, words, 2, first=MARKS - 1, count=1)
            assert (out == -1).all(), "block 0 gave up, so it marked nothing, so the others gave up"
            with pytest.raises(CommTimeout) as caught:
                comm.check()
            record = caught.value.record
            assert (record.phase, record.expected, record.reason) == ("ready", 2, "timeout")
            assert record.seen == 1
            assert words[3](BLOCKS) == 1, "block 0 has not marked its tile of the second phase"

    alone(body, timeout=0.3)
