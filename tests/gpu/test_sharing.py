# SPDX-License-Identifier: Apache-2.0
"""Both ways in which ranks share GPU memory, between real processes and between virtual ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flycomm import env, targets
from tests.launch import torchrun
from tests.ranks import rank_order_sum, run, same_bits, sample, settle

HERE = Path(__file__).parent
COLLECTIVES = HERE.parent / "host" / "collective_ranks.py"
WORLDS = HERE.parent / "host" / "world_ranks.py"
ONE_GPU = HERE / "one_gpu.py"
SHARING = env.CUDA_SHARING.name
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.fixture(params=["ipc", "fd"])
def sharing(request: pytest.FixtureRequest) -> str:
    if request.param == "fd" and targets.pick().name != "cuda":
        pytest.skip("target rocm shares memory by IPC alone")
    return request.param


def two_gpus() -> None:
    if targets.pick().runtime.device_count() < 2:
        pytest.skip("NCCL and RCCL refuse 2 ranks on 1 GPU")


def two_processes(*command: str | Path, **variables: str) -> None:
    program, *arguments = command
    done = torchrun(program, 2, *map(str, arguments), env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [f"rank {rank}: ok" in done.stdout for rank in range(2)] == [True, True]


@pytest.mark.parametrize("allocator", [{}, EXPANDABLE], ids=["segments", "expandable_segments"])
def test_collectives_between_processes(sharing: str, allocator: dict[str, str]):
    two_gpus()
    two_processes(COLLECTIVES, "against_group", **{SHARING: sharing}, **allocator)


def test_ranks_that_see_one_gpu_each(sharing: str):
    two_gpus()
    two_processes(ONE_GPU, COLLECTIVES, "against_group", **{SHARING: sharing})


def test_buffers_between_processes(sharing: str):
    """Memory is made and closed in many worlds, and refused by a rank. Their group is gloo's: one GPU will do."""
    two_processes(WORLDS, "torch_groups", **{SHARING: sharing})


@pytest.mark.parametrize("world", [2, 4])
def test_virtual_ranks(sharing: str, world: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(SHARING, sharing)

    def body(comm):
        for seed, size in enumerate((1, 4097, 70_001)):
            x = sample(comm, (size,), torch.bfloat16, seed)
            assert same_bits(comm.all_reduce(x), rank_order_sum(comm, (size,), torch.bfloat16, seed))
        comm.barrier()
        settle()  # a copy to another GPU that waits on the stream may hold up other ranks' copies
        right = comm.get_buffer((comm.rank + 1) % comm.world_size, (1000,), torch.float32)
        right.copy_(torch.full((1000,), float(comm.rank), device=comm.device))
        comm.barrier()
        mine = comm.get_buffer(comm.rank, (1000,), torch.float32)
        assert torch.all(mine == (comm.rank - 1) % comm.world_size)
        comm.barrier()

    run(world, body)


def test_the_way_asked_for_is_the_way_taken(sharing: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(SHARING, sharing)
    memory = targets.pick().memory
    free, _ = torch.cuda.mem_get_info()
    for _ in range(50):
        assert memory.sharing(0) == sharing
    assert abs(torch.cuda.mem_get_info()[0] - free) < 64 << 20, "50 allocations left no memory behind"


def test_memory_is_zeroed_and_filled(sharing: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(SHARING, sharing)
    memory = targets.pick().memory
    address = memory.allocate(3 << 20, 0)
    assert memory.read(address, 3 << 20, 0) == bytes(3 << 20)
    memory.fill(address, 0x80000000, 1000, 0)
    memory.write(address + 4, b"word", 0)
    assert memory.read(address, 12, 0) == b"\0\0\0\x80word\0\0\0\x80"
    memory.free(address, 0)
