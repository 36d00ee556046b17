# SPDX-License-Identifier: Apache-2.0
"""What test_drivers.py runs in processes of their own, where the driver is a fake one: ``driver_calls.py CASE …``."""

from __future__ import annotations

import ctypes
import os
import sys

import pytest

from flycomm import _shim
from flycomm.errors import TargetError
from flycomm.targets._shim_memory import ShimMemory
from flycomm.world import World

TARGETS = {"cuda": _shim.CUDA, "hip": _shim.HIP}


def fails(call, *said: str) -> None:
    with pytest.raises(TargetError) as caught:
        call()
    assert all(part in str(caught.value) for part in said), caught.value


def use(name: str, library: str) -> None:
    target, fake = TARGETS[name], ctypes.CDLL(library)
    memory = ShimMemory(target)
    _shim.open_driver(target)
    before = fake.fake_current()
    assert _shim.device_count(target) == 2
    assert _shim.device_query(target, 1) == {
        "device_name": "Fake 1",
        "arch": {"cuda": "sm_90", "hip": "gfx942"}[name],
        "warp_size": {"cuda": 32, "hip": 64}[name],
        "compute_units": 132,
        "memory_bytes": 1 << 37,
        "clock_hz": {"cuda": 10**9, "hip": 10**8}[name],
    }
    _shim.synchronize(target, 1)
    address = memory.allocate(5000, 1)
    assert memory.read(address, 5000, 1) == bytes(5000)
    memory.write(address + 4, b"\1\2\3", 1)
    memory.fill(address + 8, 0x80000000, 2, 1)
    assert memory.read(address, 16, 1) == b"\0\0\0\0\1\2\3\0\0\0\0\x80\0\0\0\x80"
    handle = memory.export(address, 1)
    assert len(handle) <= 128
    assert handle[0] == {"cuda": 2, "hip": 3}[name]
    memory.export_done(address, 1)
    opened = memory.open(handle, 0)
    assert fake.fake_opened() == 1
    memory.close(opened, 0)
    assert fake.fake_opened() == 0
    mapped = memory.allocate_mapped(64, 0)
    assert ctypes.string_at(mapped.host_address, 64) == bytes(64)
    memory.free_mapped(mapped, 0)
    memory.free(address, 1)
    assert fake.fake_live() == 0
    for _ in range(2):
        memory.enable_peer(0, 1)
        memory.enable_peer(1, 1)
    assert [fake.fake_peer(0, 1), fake.fake_peer(1, 0), fake.fake_peer(1, 1)] == [2, 0, 0]
    if name == "hip":
        by_fd = (target, 0, 1, _shim.SHARING["fd"], ctypes.byref(ctypes.c_uint64()))
        fails(lambda: _shim.check(_shim.lib().fc_alloc(*by_fd)), "HIP shares memory by IPC alone")
    assert memory.sharing(0) == "ipc"
    fails(lambda: memory.allocate(1, 2), "device 2 does not exist", "use 0 to 1")
    fails(lambda: memory.open(b"\1" + handle[1:], 0), "of 72 bytes and kind 1 is not one of", "same target")
    assert fake.fake_current() == max(before, {"cuda": -1, "hip": 0}[name]), "the caller's device is current again"


def buffers(name: str, library: str) -> None:
    """Virtual ranks use each other's addresses as they are."""
    from flycomm.memory import SymmetricBuffer

    fake = ctypes.CDLL(library)

    class Target:
        memory = ShimMemory(TARGETS[name])

        class runtime:
            synchronize = staticmethod(lambda device: None)

    Target.name = name

    def body(world: World) -> tuple[int, ...]:
        world.barrier()
        buffer = SymmetricBuffer(world, Target, 64, fill_word=3)
        addresses = buffer.addresses
        buffer.close()
        return addresses

    first, second = World.local(2, devices=[0, 0]).run(body)
    assert first == second
    assert (fake.fake_live(), fake.fake_opened()) == (0, 0)


def fail(name: str, library: str, function: str) -> None:
    """Every call whose driver function fails says so in the driver's words, and leaves the device as it was."""
    memory, fake = ShimMemory(TARGETS[name]), ctypes.CDLL(library)
    calls = {
        "Init": lambda: memory.allocate(1, 0),
        "Alloc": lambda: memory.allocate(1, 0),
        "Malloc": lambda: memory.allocate(1, 0),
        "Memset": lambda: memory.allocate(1, 0),
        "IpcGet": lambda: memory.export(memory.allocate(1, 0), 0),
        "IpcOpen": lambda: memory.open(memory.export(memory.allocate(1, 0), 0), 1),
        "Peer": lambda: memory.enable_peer(0, 1),
    }
    call = next(call for part, call in calls.items() if part in function)
    fails(call, "out of memory (ERROR_OUT_OF_MEMORY, code 2)")
    assert fake.fake_current() <= 0
    assert fake.fake_live() == (1 if "Ipc" in function else 0)


def no_peer(name: str, library: str) -> None:
    memory = ShimMemory(TARGETS[name])
    memory.enable_peer(1, 1)
    fails(lambda: memory.enable_peer(0, 1), "device 0 has no peer access to device 1")


def missing(name: str) -> None:
    fails(lambda: _shim.open_driver(TARGETS[name]), *sys.argv[3:])
    fails(lambda: ShimMemory(TARGETS[name]).allocate(1, 0), *sys.argv[3:])


if __name__ == "__main__":
    preload = os.environ.get("PRELOAD")
    if preload:
        ctypes.CDLL(preload)
    case = globals()[sys.argv[1]]
    case(sys.argv[2]) if sys.argv[1] == "missing" else case(*sys.argv[2:])
    print("ok")
