# SPDX-License-Identifier: Apache-2.0
"""The weak mode: stores into a peer's memory land late and out of order, and a release is what puts them in order."""

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
import torch

from tests.host.host_target import activate, pointer

pytestmark = pytest.mark.host_only

RELAXED, ACQUIRE, RELEASE = fx.AtomicOrdering.Monotonic, fx.AtomicOrdering.Acquire, fx.AtomicOrdering.Release
ACQ_REL, SEQ_CST = fx.AtomicOrdering.AcqRel, fx.AtomicOrdering.SeqCst
SEEDS = range(1, 41)
WORDS = 32  # of data, before the flag


class Window:
    """One piece of shared memory mapped twice: as its owner sees it, and as a peer does."""

    def __init__(self, target):
        self.memory = target.memory
        self.own = self.memory.allocate(4096, 0)
        self.remote = self.memory.open(self.memory.export(self.own, 0), 0)
        self.memory.export_done(self.own, 0)

    def words(self, count):
        return torch.frombuffer(bytearray(self.memory.read(self.own, 4 * count, 0)), dtype=torch.int32)

    def clear(self):
        self.memory.fill(self.own, 0, 1024, 0)

    def close(self):
        self.memory.close(self.remote, 0)
        self.memory.free(self.own, 0)


@pytest.fixture
def host(monkeypatch):
    monkeypatch.setenv("FLYCOMM_HOST_WEAK", "1")
    target = activate()
    yield target
    target.set_weak_seed(1)


@pytest.fixture
def window(host):
    window = Window(host)
    yield window
    window.close()


def word(address, index):
    return pointer(address + fx.Int64(index) * 4, fx.Int32)


# ---- message passing: block 0 stores data and then a flag; block 1 waits for the flag and copies the data


@flyc.jit
def _publish(remote, how: fx.Constexpr[str]):
    flag = word(remote, WORDS)
    if fx.const_expr(how == "relaxed"):
        fx.generic_store(flag, fx.Int32(1), memory_order=RELAXED)
    elif fx.const_expr(how == "volatile"):
        fx.generic_store(flag, fx.Int32(1), volatile=True)
    elif fx.const_expr(how == "plain"):
        fx.generic_store(flag, fx.Int32(1))
    elif fx.const_expr(how == "workgroup release"):
        fx.generic_store(flag, fx.Int32(1), memory_order=RELEASE, syncscope="workgroup")
    elif fx.const_expr(how == "acquire fence"):
        fx.memory_fence(ordering=ACQUIRE)
        fx.generic_store(flag, fx.Int32(1), memory_order=RELAXED)
    elif fx.const_expr(how == "release"):
        fx.generic_store(flag, fx.Int32(1), memory_order=RELEASE)
    elif fx.const_expr(how == "release fence"):
        fx.memory_fence(ordering=RELEASE)
        fx.generic_store(flag, fx.Int32(1), memory_order=RELAXED)
    elif fx.const_expr(how == "agent fence"):
        fx.memory_fence(ordering=ACQ_REL, syncscope="agent")
        fx.generic_store(flag, fx.Int32(1), memory_order=RELAXED)
    elif fx.const_expr(how == "seq_cst fence"):
        fx.memory_fence(ordering=SEQ_CST)
        fx.generic_store(flag, fx.Int32(1), volatile=True)
    elif fx.const_expr(how == "release add"):
        fx.atomic_add(flag, fx.Int32(1), ordering=RELEASE)
    elif fx.const_expr(how == "release swap"):
        fx.atomic_cas(flag, fx.Int32(0), fx.Int32(1), success_ordering=ACQ_REL, failure_ordering=RELAXED)


@flyc.kernel
def _message_kernel(own: fx.Int64, remote: fx.Int64, output: fx.Int64, how: fx.Constexpr[str]):
    if fx.Int32(fx.block_idx.x) == 0:
        for i in fx.range_constexpr(WORDS):
            fx.generic_store(word(remote, i), fx.Int32(i + 1))
        _publish(remote, how)
    else:
        seen = fx.generic_load(word(own, WORDS), memory_order=RELAXED)
        while seen == 0:
            seen = fx.generic_load(word(own, WORDS), memory_order=RELAXED)
        fx.memory_fence(ordering=ACQUIRE)
        for i in fx.range_constexpr(WORDS):
            fx.generic_store(word(output, i), fx.generic_load(word(own, i)))


@flyc.jit
def _message(own: fx.Int64, remote: fx.Int64, output: fx.Int64, how: fx.Constexpr[str]):
    _message_kernel(own, remote, output, how).launch(grid=(2,), block=(1,))


def stale_messages(host, window, how):
    """How many of SEEDS let the reader see the flag before the data."""
    output = torch.zeros(WORDS, dtype=torch.int32)
    arguments = [fx.Int64(address) for address in (window.own, window.remote, output.data_ptr())]
    run = flyc.compile(_message, *(fx.Int64(a) for a in (window.own, window.remote, output.data_ptr())), how)
    expected = torch.arange(1, WORDS + 1, dtype=torch.int32)
    stale = 0
    for seed in SEEDS:
        window.clear()
        host.set_weak_seed(seed)
        run(*arguments, how)
        assert torch.equal(window.words(WORDS + 1), torch.cat([expected, torch.ones(1, dtype=torch.int32)])), how
        stale += not torch.equal(output, expected)
    return stale


@pytest.mark.parametrize("how", ["relaxed", "volatile", "plain", "workgroup release", "acquire fence"])
def test_a_flag_without_a_release_overtakes_data(host, window, how):
    assert stale_messages(host, window, how) > 0


@pytest.mark.parametrize(
    "how", ["release", "release fence", "agent fence", "seq_cst fence", "release add", "release swap"]
)
def test_a_released_flag_never_does(host, window, how):
    assert stale_messages(host, window, how) == 0


def test_without_the_weak_mode_stores_keep_x86_order(host, window, monkeypatch):
    monkeypatch.setenv("FLYCOMM_HOST_WEAK", "0")
    assert stale_messages(host, window, "plain") == 0


# ---- a release speaks for its own thread only: the block barrier does not drain the others


@flyc.kernel
def _team_kernel(own: fx.Int64, remote: fx.Int64, output: fx.Int64, fence_first: fx.Constexpr[bool]):
    t = fx.Int32(fx.thread_idx.x)
    if fx.Int32(fx.block_idx.x) == 0:
        fx.generic_store(word(remote, t), t + 1)
        if fx.const_expr(fence_first):
            fx.memory_fence(ordering=RELEASE)
        fx.gpu.barrier()
        if t == 0:
            fx.generic_store(word(remote, WORDS), fx.Int32(1), memory_order=RELEASE)
    else:
        if t == 0:
            seen = fx.generic_load(word(own, WORDS), memory_order=RELAXED)
            while seen == 0:
                seen = fx.generic_load(word(own, WORDS), memory_order=RELAXED)
            fx.memory_fence(ordering=ACQUIRE)
        fx.gpu.barrier()
        fx.generic_store(word(output, t), fx.generic_load(word(own, t)))


@flyc.jit
def _team(own: fx.Int64, remote: fx.Int64, output: fx.Int64, fence_first: fx.Constexpr[bool]):
    _team_kernel(own, remote, output, fence_first).launch(grid=(2,), block=(WORDS,))


@pytest.mark.parametrize("fence_first", [False, True])
def test_a_barrier_does_not_release_for_others(host, window, fence_first):
    output = torch.zeros(WORDS, dtype=torch.int32)
    arguments = [fx.Int64(address) for address in (window.own, window.remote, output.data_ptr())]
    run = flyc.compile(_team, *arguments, fence_first)
    expected = torch.arange(1, WORDS + 1, dtype=torch.int32)
    stale = 0
    for seed in SEEDS:
        window.clear()
        host.set_weak_seed(seed)
        run(*arguments, fence_first)
        assert torch.equal(window.words(WORDS), expected), "everything has landed when the kernel ends"
        stale += not torch.equal(output, expected)
    assert (stale == 0) == fence_first


# ---- what stays in order


@flyc.kernel
def _same_place_kernel(remote: fx.Int64, output: fx.Int64):
    for i in fx.range_constexpr(8):
        fx.generic_store(word(remote, 0), fx.Int32(i))
        fx.generic_store(word(remote, 16 + i), fx.Int32(i))
    fx.generic_store(pointer(remote + fx.Int64(8), fx.Int64), fx.Int64(-1))
    fx.generic_store(word(remote, 2), fx.Int32(5))  # half of the word before
    fx.generic_store(pointer(remote + fx.Int64(15), fx.Int8), fx.Int8(7))  # its last byte
    fx.generic_store(word(remote, 4), fx.Int32(1))
    fx.generic_store(word(output, 0), fx.generic_load(word(remote, 4)))  # a thread sees its own stores
    fx.generic_store(word(remote, 5), fx.Int32(10))
    fx.atomic_add(word(remote, 5), fx.Int32(1))
    fx.generic_store(word(remote, 5), fx.generic_load(word(remote, 5), memory_order=RELAXED) + 100)


@flyc.jit
def _same_place(remote: fx.Int64, output: fx.Int64):
    _same_place_kernel(remote, output).launch(grid=(1,), block=(1,))


def test_stores_that_overlap_stay_in_order(host, window):
    output = torch.zeros(1, dtype=torch.int32)
    run = flyc.compile(_same_place, fx.Int64(window.remote), fx.Int64(output.data_ptr()))
    for seed in SEEDS:
        window.clear()
        host.set_weak_seed(seed)
        run(fx.Int64(window.remote), fx.Int64(output.data_ptr()))
        assert window.words(6).tolist() == [7, 0, 5, 0x07FFFFFF, 1, 111]
        assert output.item() == 1


@flyc.kernel
def _waves_kernel(own: fx.Int64, remote: fx.Int64, output: fx.Int64):
    if fx.Int32(fx.block_idx.x) == 0:
        for i in fx.range_constexpr(64):
            fx.generic_store(word(remote, i), fx.Int32(1), memory_order=RELAXED)
    else:
        order = fx.Int32(0)
        for _ in range(fx.Int32(400)):
            count = fx.Int32(0)
            for i in fx.range_constexpr(64):
                count = count + fx.generic_load(word(own, i), memory_order=RELAXED) * (i + 1)
            order = order * 31 + count
        fx.generic_store(word(output, 0), order)


@flyc.jit
def _waves(own: fx.Int64, remote: fx.Int64, output: fx.Int64):
    _waves_kernel(own, remote, output).launch(grid=(2,), block=(1,))


def test_a_seed_repeats_its_order_and_compiles_nothing(host, window, monkeypatch):
    """On one OS thread nothing but the seed decides."""
    monkeypatch.setenv("FLYCOMM_HOST_THREADS", "1")
    host.register()
    output = torch.zeros(1, dtype=torch.int32)
    arguments = [fx.Int64(address) for address in (window.own, window.remote, output.data_ptr())]
    run = flyc.compile(_waves, *arguments)

    def orders():
        for seed in SEEDS:
            window.clear()
            host.set_weak_seed(seed)
            run(*arguments)
            yield output.item()

    first = list(orders())
    assert first == list(orders())
    assert len(set(first)) > 10
    monkeypatch.delenv("FLYCOMM_HOST_THREADS")
    host.register()
