# SPDX-License-Identifier: Apache-2.0
"""Run by ``test_rocm_host.py`` on every rank, with the stand-in for HIP: ``rocm_ranks.py CASE …``."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.rocm_host import standin_torch

standin_torch.install()

import flycomm  # noqa: E402 (torch has to look like a ROCm build first)
from flycomm.errors import CommError, CommTimeout, PeerAccessError, TargetError, UsageError  # noqa: E402
from flycomm.kernels import _specialization  # noqa: E402
from flycomm.targets import _hip_runtime  # noqa: E402
from flycomm.world import World  # noqa: E402
from tests.ranks import rank_order_sum, same_bits, sample  # noqa: E402

SIZES = (1, 256, 1000, 4096, 8192, 40_001)  # of f32: packets, sentinel, flags, and two-shot in pieces
_FAIL = "STANDIN_HIP_FAIL"


def start(**options: Any) -> flycomm.Communicator:
    return flycomm.init(**{"target": "rocm", "fallback": "error", "max_bytes": 1 << 20, "timeout": 30.0} | options)


def left() -> None:
    """Nothing of this process's is allocated, opened or mapped, and no name of it can be seen."""
    counts = standin_torch.counts()
    assert (counts.allocated, counts.opened, counts.mapped) == (0, 0, 0), vars_of(counts)
    assert not list(Path("/dev/shm").glob(f"standin-hip.{os.getpid()}.*"))


def vars_of(counts: Any) -> dict[str, int]:
    return {name: getattr(counts, name) for name, _ in counts._fields_}


# ------------------------------------------------------------------ what a user calls


def collectives() -> None:
    """From ``flycomm.init`` to ``close``, with everything in between that a user calls."""
    with start() as comm:
        assert (comm.target, comm.plan("all_reduce", torch.float32, 4).protocol) == ("rocm", "packets")
        reduced(comm, SIZES, 3)
        parts(comm)
        signals(comm)
        symmetric(comm)
        assert len(_hip_runtime.copies()) == 1
        assert standin_torch.counts().launches > 30
    left()


def reduced(comm: flycomm.Communicator, sizes: tuple[int, ...], turns: int) -> None:
    kept = []
    for turn in range(turns):
        for size in sizes:
            for dtype in (torch.float32, torch.bfloat16):
                x = sample(comm, (size,), dtype, turn)
                kept.append((x, comm.all_reduce(x), size, dtype, turn))
    torch.cuda.synchronize()
    for _, y, size, dtype, turn in kept:
        assert same_bits(y, rank_order_sum(comm, (size,), dtype, turn)), (comm.rank, size, dtype, turn)


def parts(comm: flycomm.Communicator) -> None:
    x = sample(comm, (comm.world_size, 1000), torch.float32, 7)
    mine, all_of_them = comm.reduce_scatter_tensor(x), comm.all_gather_into_tensor(x)
    torch.cuda.synchronize()
    assert same_bits(mine, rank_order_sum(comm, x.shape, torch.float32, 7)[comm.rank : comm.rank + 1])
    expected = [sample(comm, x.shape, torch.float32, 7, rank) for rank in range(comm.world_size)]
    assert same_bits(all_of_them, torch.cat(expected))


def signals(comm: flycomm.Communicator) -> None:
    """A ring: to the right with put_signal, then a barrier."""
    right, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    there, here = (comm.get_buffer(rank, (100,), torch.int32) for rank in (right, comm.rank))
    there.fill_(comm.rank)
    comm.put_signal(right)
    comm.wait_signal(before)
    torch.cuda.synchronize()
    assert torch.all(here == before)
    comm.barrier()
    torch.cuda.synchronize()


def symmetric(comm: flycomm.Communicator) -> None:
    x = comm.empty((999,), torch.float32)
    x.tensor.copy_(sample(comm, (999,), torch.float32, 9))
    x.all_reduce_()
    torch.cuda.synchronize()
    assert same_bits(x.tensor.clone(), rank_order_sum(comm, (999,), torch.float32, 9))
    x.close()


def compiled_ahead() -> None:
    """The same, where nothing may be traced or compiled."""
    _specialization._compile = no_compiler
    collectives()


def no_compiler(specialization: Any) -> None:
    raise AssertionError(f"{specialization.name} is compiled")


# ------------------------------------------------------------------ failures

OUT_OF_MEMORY = "out of memory (hipErrorOutOfMemory, code 2)"


@contextmanager
def fails(function: str, rank: int) -> Iterator[None]:
    """Within the block, the next call of ``function`` on rank ``rank`` fails."""
    if dist.get_rank() == rank:
        os.environ[_FAIL] = f"{function}:1"
    yield
    os.environ.pop(_FAIL, None)


def without_a_target() -> None:
    """HIP does not start on one rank: all of them hear of it, and why."""
    me, last = dist.get_rank(), dist.get_world_size() - 1
    with fails("hipInit", last), pytest.raises(TargetError) as caught:
        start()
    said = f"HIP's driver was found but does not start: {OUT_OF_MEMORY}"
    assert str(caught.value).endswith(said), caught.value
    assert (f"rank {last}: " in str(caught.value)) == (me != last)
    with start() as comm:
        reduced(comm, SIZES[:1], 1)
    left()


def at_the_start() -> None:
    """What fails in ``init`` is one error on every rank, with the rank's number and HIP's words; nothing is left."""
    last = dist.get_world_size() - 1
    cases = {
        "hipExtMallocWithFlags": (TargetError, "cannot be allocated on all ranks"),
        "hipMemsetD32": (TargetError, "cannot be allocated on all ranks"),
        "hipIpcGetMemHandle": (PeerAccessError, "cannot be mapped by all ranks"),
        "hipIpcOpenMemHandle": (PeerAccessError, "cannot be mapped by all ranks"),
        "hipMemcpy": (PeerAccessError, "cannot be written by all ranks"),
        "hipHostMalloc": (TargetError, "mapped host memory"),
        "hipHostGetDevicePointer": (TargetError, "mapped host memory"),
    }
    for function, (error, said) in cases.items():
        with fails(function, last), pytest.raises(CommError) as caught:
            start()
        message = str(caught.value)
        assert isinstance(caught.value, error), (function, caught.value)
        assert said in message, (function, message)
        assert f"rank {last}: " in message, (function, message)
        assert message.count(OUT_OF_MEMORY) == 1, (function, message)
        left()
        dist.barrier()
    with start() as comm:
        reduced(comm, SIZES[:2], 1)
    left()


def without_peers() -> None:
    """One rank cannot open: all of them use the group's own backend."""
    with fails("hipIpcOpenMemHandle", 0):
        comm = start(fallback="group")
    x = torch.full((10,), float(comm.rank))
    assert not comm.should_use(x)
    assert torch.all(comm.all_reduce(x) == sum(range(comm.world_size)))
    comm.close()
    left()


def at_a_launch() -> None:
    """The rank that cannot load or launch says so; the others give up waiting for it; all of them can go on."""
    me, last = dist.get_rank(), dist.get_world_size() - 1
    with start() as comm:  # compiles, so that no rank is late for another reason
        reduced(comm, SIZES[:1], 1)
    for function in ("hipModuleLoadData", "hipModuleGetFunction", "hipModuleLaunchKernel"):
        forget()
        comm = start(timeout=4.0)
        x = torch.ones(10)
        dist.barrier()
        with fails(function, last), pytest.raises(CommError) as caught:
            reduced_and_checked(comm, x)
        if me == last:
            assert isinstance(caught.value, TargetError), caught.value
            assert f"HIP refused to load or to launch a kernel: {OUT_OF_MEMORY}" in str(caught.value)
        else:
            assert isinstance(caught.value, CommTimeout), caught.value
            assert f"waiting for peer {last}" in str(caught.value), caught.value
        comm.recover()
        comm.close()
        del comm, caught
        forget()  # an engine whose module did not load stays without it
        with start() as comm:
            reduced(comm, SIZES[:1], 1)
        left()
        dist.barrier()


def reduced_and_checked(comm: flycomm.Communicator, x: torch.Tensor) -> None:
    y = comm.all_reduce(x)  # kept: a kernel may still write to it
    torch.cuda.synchronize()
    comm.check()
    raise AssertionError(f"rank {comm.rank} has {y} and no error")


def forget() -> None:
    """No kernel is loaded. FlyDSL unloads it then, and notes as an error that one was never loaded."""
    _specialization._handles.clear()
    _specialization._build.cache_clear()
    gc.collect()
    _hip_runtime.take_error()


def at_the_end() -> None:
    """What cannot be given back is said by the rank that could not."""
    last = dist.get_world_size() - 1
    for function, count in (("hipIpcCloseMemHandle", "opened"), ("hipFree", "allocated")):
        before = vars_of(standin_torch.counts())
        comm = start()
        with fails(function, last):
            if comm.rank == last:
                with pytest.raises(TargetError, match=r"was not released: .*out of memory \(hipErrorOutOfMemory"):
                    comm.close()
            else:
                comm.close()
        after = vars_of(standin_torch.counts())
        changed = {name: after[name] - before[name] for name in ("allocated", "opened", "mapped")}
        kept = {count: 1} if comm.rank == last else {}
        assert changed == {"allocated": 0, "opened": 0, "mapped": 0} | kept


# ------------------------------------------------------------------ ranks that are threads


def virtual(*devices: str) -> None:
    """Ranks of one process: each has a stream and, on a device of its own, a module of its own."""
    places = [int(one) for one in devices]

    def body(world: World) -> None:
        with start(world=world) as comm:
            x = sample(comm, (1000,), torch.float32, 1)
            y = comm.all_reduce(x)
            torch.cuda.synchronize()
            assert same_bits(y, rank_order_sum(comm, (1000,), torch.float32, 1))

    World.local(len(places), devices=places).run(body, timeout=60)
    assert standin_torch.counts().modules == len(set(places))
    left()


def virtual_without_peers(said: str) -> None:
    def body(world: World) -> str:
        with pytest.raises(PeerAccessError) as caught:
            start(world=world)
        return str(caught.value)

    for message in World.local(2, devices=[0, 1]).run(body, timeout=60):
        assert said in message, message
    left()


# ------------------------------------------------------------------ one process, the library itself


def availability(*said: str) -> None:
    from flycomm import targets

    found = targets.get("rocm").availability()
    assert all(part in f"{found.ok}: {found.reason}" for part in said), found


def the_chip(arch: str) -> None:
    """Code is for the chip that HIP names, whatever tools are there: the stand-in refuses that of another."""
    from flycomm import kernels, targets

    targets.activate(targets.pick("rocm"))
    assert os.environ["FLYDSL_GPU_ARCH"] == arch
    target = targets.active()
    with pytest.raises(TargetError, match=r"named symbol not found"):  # for this chip, but without a host build
        target.preload(kernels.compiled(kernels.rank_barrier(3)), 0)


def ahead(said: str) -> None:
    """Loads a kernel from FLYCOMM_AOT_DIR, or raises and says why not."""
    from flycomm import kernels, targets

    targets.activate(targets.pick("rocm"))
    if said:
        with pytest.raises(UsageError, match=said):
            kernels.compiled(kernels.rank_barrier(2))
    else:
        targets.active().preload(kernels.compiled(kernels.rank_barrier(2)), 0)
        assert standin_torch.counts().modules == 1


def wrong_arguments() -> None:
    """The stand-in refuses a kernel whose host build takes other arguments."""
    from flycomm import kernels, targets

    targets.activate(targets.pick("rocm"))
    with pytest.raises(TargetError, match=r"device kernel image is invalid \(hipErrorInvalidImage, code 200\)"):
        targets.active().preload(kernels.compiled(kernels.rank_barrier(2)), 0)


CASES_WITHOUT_A_GROUP: tuple[Callable[..., None], ...] = (
    virtual,
    virtual_without_peers,
    availability,
    the_chip,
    ahead,
    wrong_arguments,
)

if __name__ == "__main__":
    case = globals()[sys.argv[1]]
    if case in CASES_WITHOUT_A_GROUP:
        case(*sys.argv[2:])
        print("ok", flush=True)
    else:
        dist.init_process_group("gloo")
        case(*sys.argv[2:])
        print(f"rank {dist.get_rank()}: ok", flush=True)
        dist.destroy_process_group()
