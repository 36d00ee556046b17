# SPDX-License-Identifier: Apache-2.0
"""What test_processes.py runs on every rank: ``python world_ranks.py CASE``. Prints ``rank <r>: ok`` when all held."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flycomm import targets
from flycomm.errors import CommError, DisagreementError, PeerAccessError, TargetError, UsageError
from flycomm.memory import SymmetricBuffer
from flycomm.world import World


def use(world: World, members: list[int]) -> None:
    """Every call of ``world``, whose ranks are the global ranks ``members``, and memory over it."""
    size, me = world.size, world.rank
    assert size == len(members)
    assert not world.local
    for turn in range(5):
        sent = [bytes([rank, turn]) * (rank * 7 + turn * 300) for rank in range(size)]
        assert world.exchange(sent[me]) == sent
    world.barrier()
    assert world.all_of(True)
    assert not world.all_of(me != size - 1)
    assert world.any_of(me == 0)
    assert world.vote(me != 0, "busy") == ["rank 0: busy"]
    world.agree(b"\0\xff", "table")
    if size > 1:
        expect(DisagreementError, lambda: world.agree(bytes([65 + (me > 0)]), "letter"), "rank 0 has letter A")
        expect(DisagreementError, lambda: world.barrier() if me else world.all_of(True), "rank 0 has all_of")
    use_memory(world)


def use_memory(world: World) -> None:
    target = targets.pick()
    for cycle in range(3):
        buffer = SymmetricBuffer(world, target, 10_000, fill_word=cycle, name="pads")
        assert target.memory.read(buffer.local_address, 10_000, world.device) == bytes([cycle, 0, 0, 0]) * 2500
        world.barrier()
        for peer, address in enumerate(buffer.addresses):
            target.memory.write(address + 16 * world.rank, bytes([world.rank, peer]) * 8, world.device)
        world.barrier()
        for peer in range(world.size):
            got = target.memory.read(buffer.local_address + 16 * peer, 16, world.device)
            assert got == bytes([peer, world.rank]) * 8
        buffer.close()
    if world.size > 1:
        last = world.size - 1
        chosen = Refusing(target) if world.rank == last else target
        said = f"rank {last}: memory of rank 0: no peer access"
        expect(PeerAccessError, lambda: SymmetricBuffer(world, chosen, 64), said)
    assert not list(Path("/dev/shm").glob(f"flycomm.{os.getpid()}.*"))


class Refusing:
    """A target on which no peer's memory can be opened."""

    def __init__(self, target: targets.Target):
        self.name, self.runtime, self.memory = target.name, target.runtime, RefusingMemory(target.memory)


class RefusingMemory:
    def __init__(self, memory: targets.Memory):
        self._memory = memory

    def __getattr__(self, name: str) -> object:
        return getattr(self._memory, name)

    def open(self, handle: bytes, device: int) -> int:
        raise TargetError("no peer access")


def expect(error: type[Exception], call: Callable[[], object], said: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert said in str(caught.value)


def torch_groups() -> None:
    """All ranks, a subgroup of ranks 1 and 3, and a gloo group beside a group that has no CPU backend to use."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World.from_group()
    assert world.rank == rank
    use(world, list(range(size)))
    members = [one for one in (1, 3) if one < size]
    subgroup = dist.new_group(members)
    if rank in members:
        world = World.from_group(subgroup)
        assert members[world.rank] == rank
        use(world, members)
    else:
        expect(UsageError, lambda: World.from_group(subgroup), f"rank {rank} is not in the group")
    cpu_group = dist.new_group(list(range(size)))
    use(World.from_group(dist.group.WORLD, cpu_group), list(range(size)))
    if rank in members and len(members) < size:
        expect(UsageError, lambda: World.from_group(subgroup, cpu_group), f"group has {members}")
    world = World.from_group()
    dist.destroy_process_group()
    assert world.group is None, "a world must not keep a group, and with it gloo's threads, alive"
    expect(CommError, world.barrier, "after its process group was destroyed")


def torch_auto() -> None:
    import torch.distributed as dist

    """``World.auto()`` makes the process group and takes it down."""
    world = World.auto()
    assert (world.rank, world.size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    use(world, list(range(world.size)))
    world.close()
    assert not dist.is_initialized()


def torch_gone() -> None:
    """The last rank ends without a word; the others hear of it from the backend and leave no name behind."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    world = World.from_group()
    world.barrier()
    if world.rank == world.size - 1:
        print(f"rank {world.rank}: ok", flush=True)
        os._exit(0)
    expect(CommError, lambda: SymmetricBuffer(world, targets.pick(), 64), "one of them may have ended")
    dist.destroy_process_group()
    assert not list(Path("/dev/shm").glob(f"flycomm.{os.getpid()}.*"))


def mpi_worlds() -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    world = World.from_mpi()
    assert (world.rank, world.size) == (comm.rank, comm.size)
    use(world, list(range(comm.size)))
    world.close()
    world = World.from_mpi(comm.Split(comm.rank % 2))
    use(world, list(range(comm.rank % 2, comm.size, 2)))
    world.close()
    world = World.auto()
    assert world.size == int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ["PMI_SIZE"])
    assert world.exchange(bytes([world.rank])) == [bytes([rank]) for rank in range(world.size)]


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    number = next(os.environ[name] for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ)
    print(f"rank {number}: ok", flush=True)
