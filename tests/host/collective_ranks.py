# SPDX-License-Identifier: Apache-2.0
"""Run by ``test_collective_processes.py`` on every rank of torchrun or mpirun: ``collective_ranks.py CASE``."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import flycomm
from flycomm.errors import CommError, CommTimeout, UsageError
from tests.ranks import rank_order_sum, same_bits, sample


def _exchange(comm: flycomm.Communicator) -> None:
    for seed, size in enumerate((1, 9, 4097, 70_001)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = sample(comm, (size,), dtype, seed)
            assert same_bits(comm.all_reduce(x), rank_order_sum(comm, (size,), dtype, seed)), (comm.rank, size, dtype)
    right = comm.get_buffer((comm.rank + 1) % comm.world_size, (1000,), torch.float32)
    right.copy_(torch.full((1000,), float(comm.rank), device=comm.device))
    comm.barrier()
    assert torch.all(comm.get_buffer(comm.rank, (1000,), torch.float32) == (comm.rank - 1) % comm.world_size)
    comm.barrier()


def against_group() -> None:
    """The group's own backend is the reference: integers in float must match to the bit, and so must the fallback."""
    _start()
    with flycomm.init(fallback="error", max_bytes=16 << 20, timeout=30) as comm:
        _exchange(comm)
        for size in (1, 1000, 33_333):
            x = torch.randint(-50, 50, (size,), generator=torch.Generator().manual_seed(comm.rank))
            for dtype in (torch.float32, torch.bfloat16):
                mine = x.to(dtype).to(comm.device)
                theirs = mine.clone()
                dist.all_reduce(theirs)
                assert torch.equal(comm.all_reduce(mine), theirs)
        with pytest.raises(UsageError, match="int64"):
            comm.all_reduce(x.to(comm.device))
        with pytest.raises(UsageError, match="exists already; close it, or pass another name="):
            flycomm.init(fallback="error", max_bytes=16 << 20)
    with flycomm.init(max_bytes=16 << 20) as comm:
        logging.disable()
        mine = torch.arange(10, device=comm.device) + comm.rank
        assert torch.equal(comm.all_reduce(mine, "max"), torch.arange(10, device=comm.device) + comm.world_size - 1)
        assert comm.all_reduce_(mine) is mine
        assert comm.all_reduce(torch.ones(3, dtype=torch.float64, device=comm.device))[0] == comm.world_size
    dist.destroy_process_group()


def subgroups() -> None:
    """Two communicators over different ranks, and one over all, used in turn."""
    _start()
    size = dist.get_world_size()
    groups = [dist.new_group(list(range(start, size, 2))) for start in (0, 1)]
    mine = groups[dist.get_rank() % 2]
    with (
        flycomm.init(mine, fallback="error", max_bytes=16 << 20) as small,
        flycomm.init(fallback="error", max_bytes=16 << 20) as large,
    ):
        assert small.world_size == len(range(dist.get_rank() % 2, size, 2))
        assert large.world_size == size
        for _ in range(3):
            _exchange(small)
            _exchange(large)
    dist.destroy_process_group()


def mpi() -> None:
    with flycomm.init(fallback="error", max_bytes=16 << 20, timeout=30) as comm:
        assert comm.world_size == int(os.environ["OMPI_COMM_WORLD_SIZE"])
        _exchange(comm)
        with pytest.raises(UsageError, match="float64"):
            comm.all_reduce(torch.zeros(1, dtype=torch.float64, device=comm.device))


def killed() -> None:
    _one_rank_ends(lambda: os.kill(os.getpid(), signal.SIGKILL))


def exits() -> None:
    _one_rank_ends(lambda: sys.exit(0))


def _one_rank_ends(end: Callable[[], None]) -> None:
    """Rank 1 is gone without a word: the others get a CommTimeout with its number, within the limit."""
    _start()
    comm = flycomm.init(fallback="error", max_bytes=16 << 20, timeout=1.0)
    x = torch.ones(100, device=comm.device)
    comm.all_reduce(x)
    comm.barrier()
    comm._session.synchronize()
    if comm.rank == 1:
        end()
    time.sleep(0.3)
    started = time.monotonic()
    result = comm.all_reduce(x)
    comm._session.synchronize()
    assert time.monotonic() - started < 5
    assert result.isnan().all()
    with pytest.raises(CommTimeout) as caught:
        comm.check()
    record = caught.value.record
    assert record is not None
    assert record.reason in ("timeout", "abort")
    assert record.phase in ("signal", "packet", "sentinel")
    assert record.reason == "abort" or record.peer == 1
    with pytest.raises((CommError, RuntimeError)):
        comm.close()
    print(f"rank {comm.rank}: ok", flush=True)
    os._exit(0)


def _start() -> None:
    backend = (
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and os.environ.get("FLYCOMM_TARGET") != "host" else "gloo"
    )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(backend)


if __name__ == "__main__":
    {case.__name__: case for case in (against_group, subgroups, mpi, killed, exits)}[sys.argv[1]]()
    rank = os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
    print(f"rank {rank}: ok", flush=True)
