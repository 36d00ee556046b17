# SPDX-License-Identifier: Apache-2.0
"""Run by ``test_sanitizer.py`` under compute-sanitizer: ``sanitized_ranks.py calls | out_of_bounds | race``.

``calls``: two virtual ranks on one device. Inputs are made and sums compared on the CPU, so that nothing of torch's but
copies is instrumented with our kernels, and none of torch's kernels has to be loaded while a rank waits. Under these
tools a copy too can wait for a kernel that runs, on another stream even: see :func:`_launched_on_all`.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
import torch

from flycomm import targets
from flycomm.errors import CommTimeout
from flycomm.tables import PROTOCOLS
from tests.ranks import DTYPES, run, same_bits, sample

SIZES = (1, 9, 1000, 4097)
MEETING_S = 20.0  # that one instrumented kernel may wait for another, where they overlap at all
PATIENCE_S = 100.0  # the same in the calls themselves
_BLOCK = 2 << 20  # bytes; the driver gives no less
_STREAM = fx.Stream(None)
IN_USE, TOGETHER, IN_TURN = "the device is in use", "kernels of two ranks overlap", "kernels run one at a time"


def _meet(comm) -> bool:
    """Whether rank 1's kernel starts while rank 0's waits for it: a tool may let them run in turn only."""
    comm.prepare([torch.float32], [4])
    comm._session.world.barrier()
    if comm.rank == 0:
        comm.wait_signal(1)
    else:
        time.sleep(0.5)
        comm.put_signal(0)
    comm._session.synchronize()
    try:
        comm.check()
    except CommTimeout:
        return False
    return True


def _sum_on_cpu(comm, size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    total = torch.zeros(size)
    for rank in range(comm.world_size):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        total = total + torch.randn((size,), generator=generator).to(dtype).float()
    return total.to(dtype)


def _launched_on_all(comm, launch: Any) -> Any:
    """``launch()``, of kernels that wait for the peers' launch alone: no rank copies before all have launched, and none
    launches before all have copied."""
    comm._session.world.barrier()
    result = launch()
    comm._session.world.barrier()
    return result


def _exchange(comm) -> None:
    torch.empty(1, device=comm.device)  # what torch takes from the driver, it takes before a rank waits
    comm.prepare(list(DTYPES.values()), [4 * size for size in SIZES])
    for seed, size in enumerate(SIZES):
        for dtype in DTYPES.values():
            x = sample(comm, (size,), dtype, seed)
            total = _launched_on_all(comm, partial(comm.all_reduce, x)).cpu()
            assert same_bits(total, _sum_on_cpu(comm, size, dtype, seed)), (comm.rank, size, dtype)
    if comm.world_size == 1:
        return
    _launched_on_all(comm, comm.barrier)
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    for turn in range(3):
        comm.get_buffer(right, (777,), torch.float32).copy_(torch.full((777,), 10.0 * turn + comm.rank))
        comm.put_signal(right, 1)
        _launched_on_all(comm, partial(comm.wait_signal, left, 1))
        assert torch.all(comm.get_buffer(comm.rank, (777,), torch.float32).cpu() == 10.0 * turn + left)
        _launched_on_all(comm, comm.barrier)
    comm.check()


def _signals_in_turn(comm) -> None:
    """What can be done where kernels run one at a time: every wait is launched after its signal has been sent."""
    comm.prepare([torch.float32], [4])
    for _ in range(3):
        comm.put_signal(1 - comm.rank, 1)
        comm._session.synchronize()
        comm._session.world.barrier()
        comm.wait_signal(1 - comm.rank, 1)
        comm._session.synchronize()
        comm._session.world.barrier()
    comm.check()


def calls() -> None:
    together = all(run(2, _meet, timeout=MEETING_S))
    for protocol in PROTOCOLS:
        run(2 if together else 1, _exchange, timeout=PATIENCE_S, protocol=protocol)
    if not together:
        run(2, _signals_in_turn, timeout=PATIENCE_S)
    print(TOGETHER if together else IN_TURN, flush=True)


# ---------------------------------------------------------------------- faults that the tools must find


@flyc.kernel
def _store_kernel(address: fx.Int64):
    pointer = fx.inttoptr(fx.PointerType.get(fx.Int32.ir_type, fx.AddressSpace.Global, 4), address)
    fx.generic_store(pointer, fx.Int32(7))


@flyc.jit
def _store(address: fx.Int64, stream: fx.Stream = _STREAM):
    _store_kernel(address).launch(grid=(1,), block=(1,), stream=stream)


@flyc.kernel
def _race_kernel(out: fx.Int64):
    """Each thread reads what another has stored, with no barrier between."""
    t = fx.Int32(fx.thread_idx.x)
    shared = fx.SharedAllocator().allocate(fx.Array[fx.Int32, 64]).peek()
    shared[t] = t
    pointer = fx.inttoptr(fx.PointerType.get(fx.Int32.ir_type, fx.AddressSpace.Global, 4), out + fx.Int64(t) * 4)
    fx.generic_store(pointer, shared[63 - t])


@flyc.jit
def _race(out: fx.Int64, stream: fx.Stream = _STREAM):
    _race_kernel(out).launch(grid=(1,), block=(64,), stream=stream)


def _faulty(launcher, offset: int) -> None:
    target = targets.active()
    target.runtime.set_device(0)
    address = target.memory.allocate(_BLOCK, 0)
    launcher(fx.Int64(address + offset))
    target.raise_pending()
    target.runtime.synchronize(0)


def out_of_bounds() -> None:
    _faulty(_store, _BLOCK + 64)


def race() -> None:
    _faulty(_race, 0)


if __name__ == "__main__":
    first = targets.active()
    first.memory.free(first.memory.allocate(_BLOCK, 0), 0)
    print(IN_USE, flush=True)
    {case.__name__: case for case in (calls, out_of_bounds, race)}[sys.argv[1]]()
