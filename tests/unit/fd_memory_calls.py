# SPDX-License-Identifier: Apache-2.0
"""What test_fd_memory.py runs in processes of their own, with a fake driver of CUDA: ``fd_memory_calls.py CASE …``."""

from __future__ import annotations

import array
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flycomm import _shim, env
from flycomm.errors import TargetError, UsageError
from flycomm.targets._shim_memory import ShimMemory

SHM = Path("/dev/shm")
NAME = slice(16, 80)  # of the socket's folder, in a handle
NOBODY = 65534
memory = ShimMemory(_shim.CUDA)


def load(library: str) -> ctypes.CDLL:
    fake = ctypes.CDLL(library)
    fake.fake_devices_of.argtypes = [ctypes.c_uint64]
    return fake


def name_of(handle: bytes) -> Path:
    return SHM / handle[NAME].rstrip(b"\0").decode()


def counts(fake: ctypes.CDLL) -> dict[str, int]:
    """What this process has: nothing of it may grow."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "names": len(list(SHM.glob(f"flycomm.{os.getpid()}.*"))),
        "memory": fake.fake_live(),
        "opened": fake.fake_opened(),
    }


class Process:
    """This script with another case, in a dialogue of JSON lines."""

    def __init__(self, case: str, library: str, **variables: str):
        command = [sys.executable, __file__, case, library]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=os.environ | variables, **pipes)

    def ask(self, question: Any) -> Any:
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return self.hear()

    def hear(self) -> Any:
        return json.loads(self.process.stdout.readline())

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def peer(library: str) -> None:
    """Open each handle on device 0, read what is in the memory, write an answer behind it, and close."""
    fake = load(library)
    for line in sys.stdin:
        try:
            address = memory.open(bytes.fromhex(json.loads(line)), 0)
        except TargetError as error:
            said: dict[str, Any] = {"error": str(error)}
        else:
            said = {"read": memory.read(address, 5, 0).decode(), "devices": fake.fake_devices_of(address)}
            memory.write(address + 8, b"answered", 0)
            memory.close(address, 0)
        print(json.dumps(said | counts(fake)), flush=True)


def owner(library: str) -> None:
    """Export memory and wait to be killed."""
    print(json.dumps(memory.export(memory.allocate(64, 1), 1).hex()), flush=True)
    sys.stdin.read()


def share(library: str) -> None:
    """One allocation through a whole life, with a peer that counts its devices from 0 as well."""
    fake = load(library)
    address = memory.allocate(5000, 1)
    assert address % 4096 == 0
    assert memory.read(address, 2 << 20, 1) == bytes(2 << 20), "all of the granule is zeroed"
    memory.write(address, b"hello", 1)
    handle = memory.export(address, 1)
    assert len(handle) <= 128
    assert handle[0] == 4
    assert memory.export(address, 1) == handle, "exporting twice is one offer"
    assert name_of(handle).stat().st_mode & 0o777 == 0o700
    with Process("peer", library) as other:
        first, second = (other.ask(handle.hex()) for _ in range(2))
        assert first == second, "nothing is left of the first time"
        assert (first["read"], first["devices"], first["memory"]) == ("hello", 0b01, 0), first
        assert memory.read(address + 8, 8, 1) == b"answered"
        for _ in range(2):
            memory.export_done(address, 1)
        assert not name_of(handle).exists()
        said = other.ask(handle.hex())["error"]
        assert all(part in said for part in (str(name_of(handle)), "has taken it back", "containers need one")), said
        again = memory.export(address, 1)
        assert other.ask(again.hex())["read"] == "hello"
    memory.free(address, 1)  # which takes the offer back too
    assert not name_of(again).exists()
    assert counts(fake)["threads"] == 1
    assert fake.fake_live() == 0
    for call in (lambda: memory.free(address, 1), lambda: memory.close(address, 1)):
        with pytest.raises(TargetError, match=f"{address:#x}"):
            call()


def cycles(library: str) -> None:
    """200 lives of an allocation leave nothing on either side."""
    fake = load(library)
    with Process("peer", library) as other:

        def cycle() -> tuple[dict[str, Any], dict[str, Any]]:
            address = memory.allocate(1, 1)
            memory.write(address, b"hello", 1)
            theirs = other.ask(memory.export(address, 1).hex())
            memory.export_done(address, 1)
            memory.free(address, 1)
            deadline = time.monotonic() + 5
            while counts(fake)["threads"] > 1 and time.monotonic() < deadline:
                time.sleep(0.001)  # /proc still shows a thread for a moment after it was joined
            return counts(fake), theirs

        first = cycle()
        assert (first[0]["threads"], first[0]["names"]) == (1, 0)
        for _ in range(200):
            assert cycle() == first


def way(library: str, kind: str, *said: str) -> None:
    """The kind of handle that an allocation gets, or what is said of it."""
    fake = load(library)
    if kind == "allocation":
        with pytest.raises(TargetError) as caught:
            memory.allocate(1, 0)
    else:
        address = memory.allocate(1, 0)
        if kind == "export":
            with pytest.raises(TargetError) as caught:
                memory.export(address, 0)
        else:
            assert memory.export(address, 0)[0] == int(kind)
            assert memory.sharing(0) == {"2": "ipc", "4": "fd"}[kind]
        memory.free(address, 0)
    assert not said or all(part in str(caught.value) for part in said), caught.value
    assert (fake.fake_live(), fake.fake_current()) == (0, -1)
    assert counts(fake)["threads"] == 1


def half(library: str, function: str) -> None:
    """Whatever fails on the way to a peer's mapping, nothing of it is left and the driver's words are said."""
    fake = load(library)
    with Process("peer", library, FAKE_FAIL=f"{function}=2") as other:
        handle = memory.export(memory.allocate(1, 1), 1)
        clean = other.ask(handle.hex())
        assert "got as a file descriptor, cannot be mapped on device 0: out of memory" in clean["error"]
        assert other.ask(handle.hex()) == clean
        assert clean["memory"] == 0
    assert fake.fake_live() == 3, "a handle, a range and a mapping: the owner's are as they were"


def devices(library: str) -> None:
    """Virtual ranks of two devices use each other's memory, whether it was allocated before or after they were told."""
    from flycomm.memory import SymmetricBuffer
    from flycomm.world import World

    fake = load(library)
    before = memory.allocate(1, 1)
    assert fake.fake_devices_of(before) == 0b10
    memory.enable_peer(0, 1)
    memory.enable_peer(0, 1)
    assert [fake.fake_devices_of(one) for one in (before, memory.allocate(1, 1), memory.allocate(1, 0))] == [3, 3, 1]

    class Target:
        name = "cuda"
        memory = ShimMemory(_shim.CUDA)

        class runtime:
            synchronize = staticmethod(lambda device: None)

    def body(world: World) -> list[int]:
        buffer = SymmetricBuffer(world, Target, 64, fill_word=3)
        seen = [fake.fake_devices_of(address) for address in buffer.addresses]
        world.barrier()
        buffer.close()
        return seen

    assert World.local(2, devices=[0, 1]).run(body) == [[3, 3], [3, 3]]

    def nonsense(world: World) -> None:
        world.barrier()
        SymmetricBuffer(world, Target, 64)

    os.environ[env.CUDA_SHARING.name] = "pigeons"
    with pytest.raises(TargetError, match=r"rank 1: FLYCOMM_CUDA_SHARING='pigeons' is not understood"):
        World.local(2, devices=[0, 1]).run(nonsense)
    with pytest.raises(UsageError):
        memory.allocate(1, 0)


def dead(library: str) -> None:
    """An owner that was killed is said at once, and its name goes with the next offer of anybody."""
    with Process("owner", library) as gone:
        handle = bytes.fromhex(gone.hear())
    assert name_of(handle).exists()
    started = time.monotonic()
    with pytest.raises(TargetError, match=r"its rank has ended"):
        memory.open(handle, 0)
    assert time.monotonic() - started < 1
    memory.export(memory.allocate(1, 0), 0)
    assert not name_of(handle).exists()
    with Process("owner", library) as alive:
        handle = bytes.fromhex(alive.hear())
        memory.export(memory.allocate(1, 0), 0)
        assert name_of(handle).exists(), "a living process keeps its name"


def stopped(library: str) -> None:
    """An owner that does not answer is given up on in time."""
    with Process("owner", library) as other:
        handle = bytes.fromhex(other.hear())
        other.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, other.process.pid, os.WSTOPPED)  # a signal sent is not yet a process stopped
        started = time.monotonic()
        with pytest.raises(TargetError, match="its rank has not answered for 10 s"):
            memory.open(handle, 0)
        assert 9 < time.monotonic() - started < 15


def ended(library: str) -> None:
    """A process that ends in order takes its name along."""
    with Process("owner", library) as other:
        handle = bytes.fromhex(other.hear())
        other.process.stdin.close()
        assert other.process.wait(timeout=20) == 0
        assert not name_of(handle).exists()


def as_nobody(body: Callable[[], None]) -> None:
    """Run ``body`` in a fork of this process that has become another user."""
    child = os.fork()
    if child == 0:
        os.setuid(NOBODY)
        try:
            body()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def users(library: str) -> None:
    """Both sides look at who is at the other end, whatever the modes of files say."""
    handle = memory.export(memory.allocate(1, 1), 1)
    path = name_of(handle)

    def no_way_in() -> None:
        with pytest.raises(TargetError, match=r"by user 65534 \(Permission denied\): ranks must be of the same user"):
            memory.open(handle, 0)

    as_nobody(no_way_in)
    path.chmod(0o755)
    (path / "fd").chmod(0o666)

    def owner_refuses() -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(str(path / "fd"))
            data, control, _, _ = connection.recvmsg(1, socket.CMSG_LEN(array.array("i").itemsize))
            assert (data, control) == (b"n", [])

    def peer_refuses() -> None:
        with pytest.raises(TargetError, match=r"\(Operation not permitted\): ranks must be of the same user"):
            memory.open(handle, 0)

    as_nobody(owner_refuses)
    (path / "fd").unlink()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path / "fd"))
        silent.listen()
        (path / "fd").chmod(0o666)
        as_nobody(peer_refuses)


def crowd(library: str) -> None:
    """Visitors that say nothing, or leave, keep nobody out; and whatever is not a handle of ours opens nothing."""
    address = memory.allocate(1, 1)
    memory.write(address, b"hello", 1)
    handle = memory.export(address, 1)
    visitors = [socket.socket(socket.AF_UNIX) for _ in range(50)]
    for index, visitor in enumerate(visitors):
        visitor.connect(str(name_of(handle) / "fd"))
        if index % 2:
            visitor.close()
    with Process("peer", library) as other:
        assert other.ask(handle.hex())["read"] == "hello"
        wrong = {
            handle[:-1]: "all ranks must use the same flycomm",
            handle[:16] + b"/../etc.".ljust(64, b"\0"): "names no socket of flycomm",
            handle[:16] + b"x" * 64: "names no socket of flycomm",
            handle[:8] + (4096).to_bytes(8, "little") + handle[16:]: "cannot be mapped on device 0",
        }
        for bad, said in wrong.items():
            assert said in other.ask(bad.hex())["error"]
    memory.free(address, 1)  # while visitors are still connected
    for visitor in visitors:
        visitor.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    if sys.argv[1] not in ("peer", "owner"):
        print("ok")
