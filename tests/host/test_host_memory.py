# SPDX-License-Identifier: Apache-2.0
"""Shared memory of the host target: the shim's calls, what they refuse, and what processes that end leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from flycomm import _shim
from flycomm.errors import CommError, TargetError
from flycomm.targets import MappedMemory
from flycomm.targets._shim_memory import ShimMemory
from tests.host.host_target import SHM, names
from tests.launch import ROOT

pytestmark = pytest.mark.host_only


@pytest.fixture
def memory(leak_free: None) -> ShimMemory:
    return ShimMemory(_shim.HOST)


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
        "was not allocated here": lambda: memory.free(address + 64, 0),
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
    address = memory.allocate(1, 0)  # or what another process has allocated meanwhile
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
