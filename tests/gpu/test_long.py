# SPDX-License-Identifier: Apache-2.0
"""Long runs: results stay right and memory stays where it is. A million calls as graphs are in ``test_graphs.py``."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

import flycomm
from flycomm.tables import PROTOCOLS
from flycomm.world import World
from tests.ranks import on_ranks, run, settle

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

CALLS = 20_000
LARGEST = 20_000  # elements
WARM_CALLS = 2000
QUEUED = 100  # calls between two looks at the stream, so that no launch waits for room in its queue
CYCLES, WARM_CYCLES = 200, 20
MAX_BYTES = 8 << 20
PAGE = 2 << 20  # bytes, of device memory


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_calls_with_changing_sizes(protocol):
    generator = torch.Generator().manual_seed(11)
    # As many of each power of two: small and large classes in turn, and nothing at all now and then.
    sizes = (2 ** (torch.rand(CALLS, generator=generator) * torch.tensor(LARGEST).log2())).int()
    sizes[::97] = 0

    def body(comm):
        ramp = torch.arange(LARGEST, device=comm.device) % 64
        x = (ramp + comm.rank).to(torch.bfloat16)
        want = (comm.world_size * ramp + sum(range(comm.world_size))).to(torch.bfloat16)
        out = torch.empty_like(x)
        wrong = torch.zeros((), dtype=torch.int64, device=comm.device)
        comm.prepare([torch.bfloat16])
        before = 0
        for call, size in enumerate(sizes.tolist()):
            if call % QUEUED == 0:
                _settle(comm)
                if call == WARM_CALLS:
                    before = torch.cuda.memory_allocated()
                comm._session.world.barrier()
            result = comm.all_reduce(x[:size], out=out[:size]) if call % 2 else comm.all_reduce(x[:size])
            wrong += (result != want[:size]).sum()
            del result
        _settle(comm)
        assert torch.cuda.memory_allocated() == before
        comm._session.world.barrier()
        assert wrong.item() == 0
        comm.check()

    run(2, body, patience=280, protocol=protocol)


def test_made_and_closed_communicators_leave_nothing():
    def body(world: World) -> None:
        before = _Footprint()
        for cycle in range(CYCLES):
            with flycomm.init(world=world, fallback="error", max_bytes=MAX_BYTES, timeout=20) as comm:
                x = torch.full((1000,), 1.0, device=comm.device)
                assert torch.all(comm.all_reduce(x) == world.size)
                comm.barrier()
                del x
            world.barrier()
            if cycle == WARM_CYCLES:
                before = _Footprint()
            world.barrier()
        after = _Footprint()
        assert after.torch == before.torch
        assert after.device <= before.device + PAGE, "less than 12 KiB a cycle, or the driver's own"
        assert after.descriptors <= before.descriptors
        assert after.mappings < before.mappings + (CYCLES - WARM_CYCLES) // 4
        world.barrier()

    on_ranks(2, body, patience=280)


class _Footprint:
    """Bytes in use on the current device, by torch's tensors and by everybody; and what this process has open."""

    _one_looks = threading.Lock()  # looking opens a file

    def __init__(self) -> None:
        free, total = torch.cuda.mem_get_info()
        self.torch = torch.cuda.memory_allocated()
        self.device = total - free
        with self._one_looks:
            self.descriptors = len(os.listdir("/proc/self/fd"))
            self.mappings = Path("/proc/self/maps").read_text().count("\n")


def _settle(comm) -> None:
    """All ranks have done what they launched. Their streams only: the device may be waiting for another rank."""
    settle()
    comm._session.world.barrier()
