# SPDX-License-Identifier: Apache-2.0
"""Memory that ranks map of each other: the shim's calls, and SymmetricBuffer from allocation to close."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flycomm import _shim, targets
from flycomm.errors import ClosedError, CommError, DisagreementError, PeerAccessError, TargetError, UsageError
from flycomm.memory import SymmetricBuffer
from flycomm.targets import MappedMemory, Target
from flycomm.targets._shim_memory import ShimMemory
from flycomm.world import World
from tests.launch import ROOT
from tests.ranks import devices

SIZES = [1, 2, 3, 5, 8]
SHM = Path("/dev/shm")


def names(pid: int) -> list[str]:
    """The shared memory of process ``pid`` that other processes can see."""
    return [path.name for path in SHM.glob(f"flycomm.{pid}.*")]


def footprint() -> dict[str, int]:
    maps = Path("/proc/self/maps").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "names": len(names(os.getpid())),
        "mappings": maps.count(f"/flycomm.{os.getpid()}."),
    }


@pytest.fixture
def leak_free() -> Iterator[None]:
    before = footprint()
    yield
    assert footprint() == before


@pytest.fixture
def memory(leak_free: None) -> ShimMemory:
    return ShimMemory(_shim.HOST)


# ---------------------------------------------------------------------- the shim, host target


def test_memory_is_zeroed_aligned_and_readable(memory: ShimMemory):
    address = memory.allocate(10_000, 0)
    assert address % 4096 == 0
    assert memory.read(address, 10_000, 0) == bytes(10_000)
    memory.write(address + 5, b"a\0b", 0)
    assert memory.read(address + 4, 5, 0) == b"\0a\0b\0"
    memory.fill(address, 0x80000000, 2500, 0)
    assert memory.read(address, 10_000, 0) == b"\0\0\0\x80" * 2500
    assert memory.read(address, 0, 0) == b""
    memory.free(address, 0)


def test_an_opened_handle_is_the_same_memory_at_another_address(memory: ShimMemory):
    address = memory.allocate(4096, 0)
    handle = memory.export(address, 0)
    assert len(handle) <= 128
    opened = [memory.open(handle, 0) for _ in range(2)]
    assert len({address, *opened}) == 3
    memory.write(opened[0] + 8, b"peer", 0)
    assert memory.read(address + 8, 4, 0) == memory.read(opened[1] + 8, 4, 0) == b"peer"
    memory.export_done(address, 0)
    memory.free(address, 0)
    assert memory.read(opened[0] + 8, 4, 0) == b"peer", "a mapping outlives its owner"
    for one in opened:
        memory.close(one, 0)


def test_a_name_is_private_and_gone_once_shared(memory: ShimMemory):
    address = memory.allocate(4096, 0)
    (name,) = names(os.getpid())
    assert (SHM / name).stat().st_mode & 0o777 == 0o600
    memory.export_done(address, 0)
    memory.export_done(address, 0)
    assert names(os.getpid()) == []
    with pytest.raises(TargetError, match="before all peers have opened it"):
        memory.export(address, 0)
    memory.free(address, 0)


def test_mapped_memory_is_the_hosts_own(memory: ShimMemory):
    mapped = memory.allocate_mapped(100, 0)
    assert mapped == MappedMemory(mapped.host_address, mapped.host_address, 100)
    assert memory.read(mapped.host_address, 100, 0) == bytes(100)
    memory.free_mapped(mapped, 0)


def test_what_memory_refuses(memory: ShimMemory):
    address = memory.allocate(4096, 0)
    handle = memory.export(address, 0)
    end = handle.index(b"\0", 16)  # of the name
    wrong: dict[str, Callable[[], object]] = {
        "an allocation of 0 bytes": lambda: memory.allocate(0, 0),
        "device 3 does not exist": lambda: memory.allocate(1, 3),
        "is not a peer's memory": lambda: memory.close(address, 0),
        "was not allocated here": lambda: memory.free(address + 4096, 0),
        "is not an allocation that can still be shared": lambda: memory.export(address + 1, 0),
        "is not one of the host target's": lambda: memory.open(handle[:-1], 0),
        r"of 0 bytes and kind 0": lambda: memory.open(b"", 0),
        r"kind 2 is not one of the host": lambda: memory.open(b"\2" + handle[1:], 0),
        "names no shared memory of flycomm": lambda: memory.open(handle.replace(b"/flycomm", b"/../etc."), 0),
        "cannot be opened: No such file": lambda: memory.open(handle[: end - 4] + b"none" + handle[end:], 0),
        r"has not the 8192 bytes": lambda: memory.open(handle[:8] + b"\0\x20" + handle[10:], 0),
    }
    for said, call in wrong.items():
        with pytest.raises(CommError, match=said):
            call()
    memory.free(address, 0)
    with pytest.raises(TargetError, match="or is freed already"):
        memory.free(address, 0)


def test_more_than_there_is_is_an_error_with_the_numbers(memory: ShimMemory):
    with pytest.raises(TargetError, match=r"35184372088832 bytes .* /dev/shm, which has \d+ bytes left.*--shm-size"):
        memory.allocate(1 << 45, 0)


def test_the_host_device():
    found = _shim.device_query(_shim.HOST, 0)
    assert found["device_name"]
    assert found["compute_units"] == len(os.sched_getaffinity(0))
    assert found["memory_bytes"] > 1 << 28
    assert _shim.device_count(_shim.HOST) == 1
    with pytest.raises(TargetError, match="device 1 does not exist"):
        _shim.device_query(_shim.HOST, 1)
    with pytest.raises(TargetError, match="target number 7"):
        _shim.open_driver(7)


# ---------------------------------------------------------------------- processes that end

_OWNER = """
import os, sys
from flycomm import _shim
from flycomm.targets._shim_memory import ShimMemory
memory = ShimMemory(_shim.HOST)
address = memory.allocate(1 << 20, 0)
memory.write(address, b"alive", 0)
if "fork" in sys.argv:
    if os.fork() == 0:
        sys.exit(0)  # a child that ends in order, destructors and all
    os.wait()
print(memory.export(address, 0).hex(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner() -> Iterator[Callable[..., tuple[subprocess.Popen[str], bytes]]]:
    """Start a process that has exported memory, and waits; gives it with its handle."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> tuple[subprocess.Popen[str], bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", _OWNER, *arguments],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        return process, bytes.fromhex(process.stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_killed_process_leaves_no_shared_memory(memory: ShimMemory, owner):
    process, _ = owner()
    assert len(names(process.pid)) == 1
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(names(process.pid)) == 1, "nobody was there to remove it"
    address = memory.allocate(1, 0)
    assert names(process.pid) == []
    memory.free(address, 0)


def test_a_survivor_that_frees_removes_what_a_killed_peer_left(memory: ShimMemory, owner):
    process, _ = owner()
    address = memory.allocate(1, 0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    memory.free(address, 0)
    assert names(process.pid) == []


def test_a_living_process_keeps_its_shared_memory(memory: ShimMemory, owner):
    process, handle = owner("fork")
    memory.free(memory.allocate(1, 0), 0)
    opened = memory.open(handle, 0)
    assert memory.read(opened, 5, 0) == b"alive"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert memory.read(opened, 5, 0) == b"alive"
    memory.close(opened, 0)
    memory.free(memory.allocate(1, 0), 0)


def test_a_process_that_ends_in_order_takes_its_names_along(owner):
    process, _ = owner()
    process.communicate("")
    assert process.returncode == 0
    assert names(process.pid) == []


# ---------------------------------------------------------------------- SymmetricBuffer


class Rank:
    """A rank's view of the target, whose memory fails as a test wishes; everything else is the target's own."""

    def __init__(self, target: Target, **faults: Callable[..., object]):
        self.name, self.runtime, self.memory = target.name, target.runtime, Faulty(target.memory, faults)


class Faulty:
    def __init__(self, memory: object, faults: dict[str, Callable[..., object]]):
        self._memory, self._faults = memory, faults

    def __getattr__(self, name: str) -> object:
        return self._faults.get(name) or getattr(self._memory, name)


def refuse(*_: object) -> None:
    raise TargetError("peer access is refused")


def on_all(size: int, body: Callable[..., object], *args: object) -> list:
    return World.local(size, devices(size)).run(body, *args, timeout=60)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_bytes", [1, 4096, 100_001])
def test_every_rank_reaches_every_peer(leak_free: None, size: int, num_bytes: int):
    target = targets.pick()

    def body(world: World) -> tuple[int, ...]:
        buffer = SymmetricBuffer(world, target, num_bytes, fill_word=0xABAD1DEA, name="test")
        device, memory = world.device, target.memory
        assert buffer.num_bytes == num_bytes
        assert buffer.local_address == buffer.addresses[world.rank]
        whole = -(-num_bytes // 4) * 4
        assert memory.read(buffer.local_address, whole, device) == b"\xea\x1d\xad\xab" * (whole // 4)
        world.barrier()
        for peer, address in enumerate(buffer.addresses):
            memory.write(address + 8 * world.rank, bytes([world.rank, peer] * 4), device)
        world.barrier()
        for peer in range(size):
            assert memory.read(buffer.local_address + 8 * peer, 8, device) == bytes([peer, world.rank] * 4)
        addresses = buffer.addresses
        buffer.close()
        return addresses

    views = on_all(size, body)
    if target.memory.opens_own_exports:
        assert len({address for view in views for address in view}) == size * size, "a peer's mapping is its own"


@pytest.mark.parametrize("size", [1, 3])
def test_two_buffers_at_once_are_apart(leak_free: None, size: int):
    target = targets.pick()

    def body(world: World) -> None:
        first = SymmetricBuffer(world, target, 4096, fill_word=1, name="first")
        second = SymmetricBuffer(world, target, 8192, fill_word=2, name="second")
        assert not set(first.addresses) & set(second.addresses)
        first.close()
        world.barrier()
        for address in second.addresses:
            assert target.memory.read(address, 8192, world.device) == b"\2\0\0\0" * 2048
        second.close()

    on_all(size, body)


@pytest.mark.parametrize("size", [2, 3])
def test_a_thousand_cycles_leave_nothing(leak_free: None, size: int):
    target = targets.pick()

    def body(world: World) -> None:
        for cycle in range(1000):
            SymmetricBuffer(world, target, 1000 + cycle, fill_word=cycle).close()

    on_all(size, body)


def test_a_closed_buffer_is_refused(leak_free: None):
    def body(world: World) -> None:
        buffer = SymmetricBuffer(world, targets.pick(), 64, name="pads")
        buffer.close()
        buffer.close()
        for name in ("addresses", "local_address"):
            with pytest.raises(ClosedError, match="symmetric buffer 'pads' of 64 bytes is closed"):
                getattr(buffer, name)

    on_all(2, body)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        ("open", PeerAccessError, "cannot be mapped by all ranks: rank 1: memory of rank 0: peer access is refused"),
        ("export", PeerAccessError, "cannot be mapped by all ranks: rank 1: peer access is refused"),
        ("write", PeerAccessError, "cannot be written by all ranks: rank 1: memory of rank 0: peer access is refused"),
        ("read", PeerAccessError, "cannot be used by all ranks: rank 1: memory of rank 0: peer access is refused"),
        ("allocate", TargetError, "cannot be allocated on all ranks: rank 1: peer access is refused"),
        ("fill", TargetError, "cannot be allocated on all ranks: rank 1: peer access is refused"),
        ("export_done", TargetError, "keeps a name that others can see: rank 1: peer access is refused"),
    ],
)
def test_one_rank_that_cannot_is_an_error_on_all(leak_free: None, call: str, error: type[CommError], said: str):
    host = targets.get("host")

    def body(world: World) -> str:
        target = Rank(host, **({call: refuse} if world.rank == 1 else {}))
        with pytest.raises(error) as caught:
            SymmetricBuffer(world, target, 5000, name="pads")
        assert type(caught.value) is error
        SymmetricBuffer(world, host, 5000).close()  # the ranks are still in step
        return str(caught.value)

    messages = on_all(3, body)
    assert said in messages[0]
    assert messages[0].startswith("symmetric buffer 'pads' of 5000 bytes")
    assert len(set(messages)) == 1


def test_memory_that_maps_but_does_not_work_is_found(leak_free: None):
    """A write to a peer that goes nowhere: what a driver reports as peer access and hardware does not do."""
    host = targets.get("host")

    def body(world: World) -> str:
        target = Rank(host, **({"write": lambda *_: None} if world.rank == 2 else {}))
        with pytest.raises(PeerAccessError) as caught:
            SymmetricBuffer(world, target, 64)
        return str(caught.value)

    message = on_all(3, body)[0]
    assert "rank 0: a word that rank 2 wrote has not arrived (0x00000000 is there)" in message
    assert "rank 1: a word that rank 2 wrote has not arrived" in message
    assert "rank 2: a word written to rank 0 reads as 0x00000000" in message


def test_nobody_goes_on_before_every_rank_has_its_fill_back(leak_free: None):
    """The last thing a rank does for its peers is to put the fill back; a late one must not wipe what they send."""
    host = targets.get("host")

    def body(world: World) -> None:
        fills = Counter[str]()

        def late_fill(*arguments: int) -> None:
            fills["fill"] += 1
            if fills["fill"] == 2 and world.rank == 0:
                time.sleep(0.2)
            host.memory.fill(*arguments)

        buffer = SymmetricBuffer(world, Rank(host, fill=late_fill), 64)
        host.memory.write(buffer.addresses[0] + 4 * world.rank, b"data", 0)
        world.barrier()
        assert host.memory.read(buffer.addresses[0], 8, 0) == b"datadata"
        buffer.close()

    on_all(2, body)


def test_arguments_that_differ_name_both_sides(leak_free: None):
    def body(world: World) -> str:
        with pytest.raises(DisagreementError) as caught:
            SymmetricBuffer(world, targets.pick(), 4096 if world.rank else 8192, name="pads")
        return str(caught.value)

    for message in on_all(3, body):
        assert 'rank 0 has symmetric buffer {"name": "pads", "num_bytes": 8192' in message
        assert 'ranks 1, 2 have symmetric buffer {"name": "pads", "num_bytes": 4096' in message


@pytest.mark.parametrize("arguments", [{"num_bytes": 0}, {"num_bytes": -5}, {"num_bytes": 4, "fill_word": 1 << 32}])
def test_arguments_out_of_range(leak_free: None, arguments: dict[str, int]):
    def body(world: World) -> None:
        with pytest.raises(UsageError, match="at least 1 byte and a 32-bit word"):
            SymmetricBuffer(world, targets.pick(), **arguments)

    on_all(2, body)


def test_a_buffer_that_nobody_closed_warns():
    def body(world: World) -> None:
        buffer = SymmetricBuffer(world, targets.pick(), 64, name="pads")
        with pytest.warns(ResourceWarning, match="symmetric buffer 'pads' of 64 bytes was not closed"):
            buffer.__del__()
        buffer.close()
        buffer.__del__()

    on_all(1, body)


def test_a_rank_that_is_gone_leaves_no_name_and_is_said():
    """Rank 1 fails between its export and its opening: the others have opened nothing yet, or all."""
    host = targets.get("host")

    def body(world: World) -> None:
        def fail(*_: object) -> None:
            raise MemoryError("gone")

        SymmetricBuffer(world, Rank(host, **({"open": fail} if world.rank == 1 else {})), 64)

    with pytest.raises(MemoryError, match="gone"):
        on_all(3, body)
    assert names(os.getpid()) == []


def test_close_after_a_rank_is_gone_raises_and_unmaps():
    host = targets.get("host")
    closed = []

    def body(world: World) -> None:
        def close(address: int, device: int) -> None:
            closed.append(world.rank)
            host.memory.close(address, device)

        buffer = SymmetricBuffer(world, Rank(host, close=close), 64)
        if world.rank == 1:
            buffer._usable = False
            raise KeyError("gone")
        with pytest.raises(CommError, match="rank 1 failed"):
            buffer.close()

    with pytest.raises(KeyError, match="gone"):
        on_all(3, body)
    assert Counter(closed) == {0: 2, 2: 2}
