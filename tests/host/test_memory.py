# SPDX-License-Identifier: Apache-2.0
"""Memory that ranks map of each other: SymmetricBuffer from allocation to close, and when a rank cannot."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable

import pytest

from flycomm import targets
from flycomm.errors import ClosedError, CommError, DisagreementError, PeerAccessError, TargetError, UsageError
from flycomm.memory import SymmetricBuffer
from flycomm.targets import Target
from flycomm.world import World
from tests.host.host_target import names
from tests.ranks import devices

SIZES = [1, 2, 3, 5, 8]


class Rank:
    """A rank's view of the target, whose memory fails as a test wishes; everything else is the target's own."""

    def __init__(self, target: Target, **faults: Callable[..., object]):
        self.name, self.runtime, self.memory = target.name, target.runtime, Faulty(target.memory, faults)


class Faulty:
    def __init__(self, memory: object, faults: dict[str, Callable[..., object]]):
        self._memory, self._faults = memory, faults

    def __getattr__(self, name: str) -> object:
        return self._faults.get(name) or getattr(self._memory, name)


def opening(target: Target) -> str:
    """The call by which a virtual rank comes to a peer's memory."""
    return "open" if target.memory.opens_own_exports else "enable_peer"


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
    target = targets.pick()
    if call == "export" and not target.memory.opens_own_exports:
        pytest.skip("virtual ranks on GPUs export nothing to each other")
    call = opening(target) if call == "open" else call

    def body(world: World) -> str:
        mine = Rank(target, **({call: refuse} if world.rank == 1 else {}))
        with pytest.raises(error) as caught:
            SymmetricBuffer(world, mine, 5000, name="pads")
        assert type(caught.value) is error
        SymmetricBuffer(world, target, 5000).close()  # the ranks are still in step
        return str(caught.value)

    messages = on_all(3, body)
    assert said in messages[0]
    assert messages[0].startswith("symmetric buffer 'pads' of 5000 bytes")
    assert len(set(messages)) == 1


def test_memory_that_maps_but_does_not_work_is_found(leak_free: None):
    """A write to a peer that goes nowhere: what a driver reports as peer access and hardware does not do."""
    target = targets.pick()

    def body(world: World) -> str:
        mine = Rank(target, **({"write": lambda *_: None} if world.rank == 2 else {}))
        with pytest.raises(PeerAccessError) as caught:
            SymmetricBuffer(world, mine, 64)
        return str(caught.value)

    message = on_all(3, body)[0]
    assert "rank 0: a word that rank 2 wrote has not arrived (0x00000000 is there)" in message
    assert "rank 1: a word that rank 2 wrote has not arrived" in message
    assert "rank 2: a word written to rank 0 reads as 0x00000000" in message


def test_nobody_goes_on_before_every_rank_has_its_fill_back(leak_free: None):
    """The last thing a rank does for its peers is to put the fill back; a late one must not wipe what they send."""
    target = targets.pick()

    def body(world: World) -> None:
        fills = Counter[str]()

        def late_fill(*arguments: int) -> None:
            fills["fill"] += 1
            if fills["fill"] == 2 and world.rank == 0:
                time.sleep(0.2)
            target.memory.fill(*arguments)

        buffer = SymmetricBuffer(world, Rank(target, fill=late_fill), 64)
        target.memory.write(buffer.addresses[0] + 4 * world.rank, b"data", world.device)
        world.barrier()
        assert target.memory.read(buffer.addresses[0], 8, world.device) == b"datadata"
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
    target = targets.pick()

    def body(world: World) -> None:
        def fail(*_: object) -> None:
            raise MemoryError("gone")

        SymmetricBuffer(world, Rank(target, **({opening(target): fail} if world.rank == 1 else {})), 64)

    with pytest.raises(MemoryError, match="gone"):
        on_all(3, body)
    assert names(os.getpid()) == []


def test_close_after_a_rank_is_gone_raises_and_unmaps():
    target = targets.pick()
    closed = []

    def body(world: World) -> None:
        def close(address: int, device: int) -> None:
            closed.append(world.rank)
            target.memory.close(address, device)

        buffer = SymmetricBuffer(world, Rank(target, close=close), 64)
        if world.rank == 1:
            buffer._usable = False
            raise KeyError("gone")
        with pytest.raises(CommError, match="rank 1 failed"):
            buffer.close()

    with pytest.raises(KeyError, match="gone"):
        on_all(3, body)
    assert Counter(closed) == ({0: 2, 2: 2} if target.memory.opens_own_exports else {})
