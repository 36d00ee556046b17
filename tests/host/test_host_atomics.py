# SPDX-License-Identifier: Apache-2.0
"""Atomics at every scope, and kernels that wait: for another block, for another launch, for a peer that is late."""

import threading
import time
from functools import cache

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
import torch

from tests.host.host_target import activate, at, load, pointer, store

pytestmark = pytest.mark.host_only

RELAXED, ACQUIRE, RELEASE = fx.AtomicOrdering.Monotonic, fx.AtomicOrdering.Acquire, fx.AtomicOrdering.Release
SCOPES = ["", "agent", "workgroup", "wavefront", "singlethread"]  # "" is system


@pytest.fixture(autouse=True)
def host():
    return activate()


@cache
def _atomics(scope):
    @flyc.kernel
    def kernel(x: fx.Int64, old: fx.Int64, real: fx.Int64):
        t = fx.Int32(fx.block_idx.x) * 64 + fx.Int32(fx.thread_idx.x)

        def word(i):
            return pointer(x + fx.Int64(i * 4), fx.Int32)

        store(old, t, fx.Int32(fx.atomic_add(word(0), fx.Int32(1), syncscope=scope)))
        fx.atomic_sub(word(1), t, syncscope=scope, ordering=fx.AtomicOrdering.AcqRel)
        fx.atomic_min(word(2), t - 100, syncscope=scope, ordering=fx.AtomicOrdering.SeqCst)
        fx.atomic_max(word(3), t, syncscope=scope)
        fx.atomic_or(word(4), fx.Int32(1) << (t % 31), syncscope=scope)
        fx.atomic_and(word(5), ~(fx.Int32(1) << (t % 31)), syncscope=scope)
        fx.atomic_xor(word(6), t, syncscope=scope)
        fx.atomic_fmax(pointer(real, fx.Float32), fx.Float32(t) * fx.Float32(0.5), syncscope=scope)
        fx.atomic_add(pointer(real + fx.Int64(4), fx.Float32), fx.Float32(0.25), syncscope=scope)
        fx.memory_fence(ordering=fx.AtomicOrdering.SeqCst, syncscope=scope)
        fx.atomic_cas(pointer(x + fx.Int64(28), fx.Int32), t, t + fx.Int32(1), syncscope=scope)

    @flyc.jit
    def launch(x: fx.Int64, old: fx.Int64, real: fx.Int64):
        kernel(x, old, real).launch(grid=(4,), block=(64,))

    return launch


@pytest.mark.parametrize("scope", SCOPES)
def test_atomics_at_every_scope(scope):
    threads = 256
    x = torch.tensor([0, 0, 0, 0, 0, -1, 0, 0], dtype=torch.int32)
    old, real = torch.zeros(threads, dtype=torch.int32), torch.tensor([-1.0, 0.0])
    _atomics(scope)(at(x), at(old), at(real))
    assert sorted(old.tolist()) == list(range(threads))
    folded = 0
    for t in range(threads):
        folded ^= t
    assert x[:7].tolist() == [threads, -sum(range(threads)), -100, threads - 1, 2**31 - 1, -(2**31), folded]
    assert real.tolist() == [(threads - 1) / 2, threads / 4]
    assert 0 < x[7] <= threads


@flyc.kernel
def _shared_atomics_kernel(output: fx.Int64):
    t = fx.Int32(fx.thread_idx.x)
    count = fx.SharedAllocator().allocate(fx.Array[fx.Int32, 1])
    address = fx.inttoptr(fx.PointerType.get(fx.Int32.ir_type, fx.AddressSpace.Shared, 4), fx.ptrtoint(count._ptr))
    if t == 0:
        count.peek()[0] = fx.Int32(0)
    fx.gpu.barrier()
    fx.atomic_add(address, t, syncscope="workgroup")
    fx.gpu.barrier()
    store(output, fx.Int32(fx.block_idx.x) * 128 + t, count.peek()[0])


@flyc.jit
def _shared_atomics(output: fx.Int64):
    _shared_atomics_kernel(output).launch(grid=(5,), block=(128,))


def test_atomics_in_shared_memory():
    output = torch.zeros(5 * 128, dtype=torch.int32)
    _shared_atomics(at(output))
    assert (output == sum(range(128))).all()


# ---- waiting


@flyc.jit
def _wait(address, value, volatile: fx.Constexpr[bool]):
    word = pointer(address, fx.Int32)
    if fx.const_expr(volatile):
        seen = fx.generic_load(word, volatile=True)
        while seen < value:
            seen = fx.generic_load(word, volatile=True)
    else:
        seen = fx.generic_load(word, memory_order=RELAXED)
        while seen < value:
            seen = fx.generic_load(word, memory_order=RELAXED)
    fx.memory_fence(ordering=ACQUIRE)


@flyc.kernel
def _chain_kernel(flags: fx.Int64, data: fx.Int64, blocks: fx.Int32, volatile: fx.Constexpr[bool]):
    """Block b waits for block b + 1, so the first blocks to start are the last to end."""
    b, t = fx.Int32(fx.block_idx.x), fx.Int32(fx.thread_idx.x)
    if b + 1 < blocks:
        if t == 0:
            _wait(flags + fx.Int64(b + 1) * 4, fx.Int32(1), volatile)
        fx.gpu.barrier()
        store(data, b * 64 + t, load(data, (b + 1) * 64 + t, fx.Int32) + 1)
    fx.gpu.barrier()
    if t == 0:
        fx.generic_store(pointer(flags + fx.Int64(b) * 4, fx.Int32), fx.Int32(1), memory_order=RELEASE)


@flyc.jit
def _chain(flags: fx.Int64, data: fx.Int64, blocks: fx.Int32, volatile: fx.Constexpr[bool]):
    _chain_kernel(flags, data, blocks, volatile).launch(grid=(blocks,), block=(64,))


@pytest.mark.parametrize("volatile", [False, True], ids=["atomic", "volatile"])
def test_blocks_of_one_launch_wait_for_later_ones(volatile):
    blocks = 40
    flags, data = torch.zeros(blocks, dtype=torch.int32), torch.zeros(blocks, 64, dtype=torch.int32)
    _chain(at(flags), at(data), blocks, volatile)
    assert torch.equal(data[:, 0], torch.arange(blocks - 1, -1, -1, dtype=torch.int32))
    assert (data == data[:, :1]).all()


def test_a_lock_that_is_taken_lets_its_holder_run():
    counter = torch.zeros(2, dtype=torch.int32)
    _locked(at(counter))
    assert counter.tolist() == [0, 4 * 32 * 5]


@flyc.kernel
def _locked_kernel(words: fx.Int64):
    lock, count = pointer(words, fx.Int32), pointer(words + fx.Int64(4), fx.Int32)
    for _ in range(fx.Int32(5)):
        taken = fx.Int32(fx.atomic_xchg(lock, fx.Int32(1), ordering=ACQUIRE))
        while taken != 0:
            taken = fx.Int32(fx.atomic_xchg(lock, fx.Int32(1), ordering=ACQUIRE))
        fx.generic_store(count, fx.generic_load(count) + 1)
        fx.generic_store(lock, fx.Int32(0), memory_order=RELEASE)


@flyc.jit
def _locked(words: fx.Int64):
    _locked_kernel(words).launch(grid=(4,), block=(32,))


@flyc.kernel
def _ring_kernel(mine: fx.Int64, peer: fx.Int64, rounds: fx.Int32):
    t, b = fx.Int32(fx.thread_idx.x), fx.Int32(fx.block_idx.x)
    for i in range(rounds):
        if t == 0:
            word = pointer(peer + fx.Int64(b) * 4, fx.Int32)
            fx.generic_store(word, fx.Int32(i) + 1, memory_order=RELEASE)
            _wait(mine + fx.Int64(b) * 4, fx.Int32(i) + 1, False)
        fx.gpu.barrier()


@flyc.jit
def _ring(mine: fx.Int64, peer: fx.Int64, rounds: fx.Int32):
    _ring_kernel(mine, peer, rounds).launch(grid=(4,), block=(64,))


class Ring:
    """``size`` OS threads; the kernel of each waits, round by round, for its left neighbour's."""

    def __init__(self, size, rounds):
        self.pads = [torch.zeros(4, dtype=torch.int32) for _ in range(size)]
        self.rounds = rounds
        run = flyc.compile(_ring, fx.Int64(0), fx.Int64(0), fx.Int32(0))
        self.threads = [threading.Thread(target=self._rank, args=(run, r), daemon=True) for r in range(size)]

    def _rank(self, run, r):
        run(at(self.pads[r]), at(self.pads[(r + 1) % len(self.pads)]), fx.Int32(self.rounds))

    def join(self):
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()
        assert all((pad == self.rounds).all() for pad in self.pads)


@pytest.mark.parametrize("size", [2, 8])
def test_launches_of_many_threads_wait_for_each_other(size):
    ring = Ring(size, 50)
    for thread in ring.threads:
        thread.start()
    ring.join()


def test_no_core_is_busy_while_all_wait():
    ring = Ring(8, 1)
    for thread in ring.threads[1:]:
        thread.start()
    time.sleep(0.2)  # by then the waiting ones sleep
    cpu, wall = time.process_time(), time.monotonic()
    time.sleep(0.5)
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    ring.threads[0].start()
    ring.join()
    assert cpu < 0.5 * wall, f"{cpu:.2f} s of CPU in {wall:.2f} s"


@flyc.kernel
def _many_kernel(arrived: fx.Int64, threads: fx.Int32):
    fx.atomic_add(pointer(arrived, fx.Int32), fx.Int32(1), ordering=RELEASE)
    _wait(arrived, threads, False)


@flyc.jit
def _many(arrived: fx.Int64, blocks: fx.Int32):
    _many_kernel(arrived, blocks * 256).launch(grid=(blocks,), block=(256,))


def test_thousands_of_threads_are_resident_at_once():
    arrived = torch.zeros(1, dtype=torch.int32)
    _many(at(arrived), 24)
    assert arrived.item() == 24 * 256
