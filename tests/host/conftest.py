# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests that run on any target."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flycomm import targets
from flycomm.memory import SymmetricBuffer
from flycomm.world import World
from tests.host.host_target import names
from tests.ranks import devices

_BLOCK = 2 << 20  # bytes; what a GPU's driver allocates at least


@pytest.fixture(scope="session")
def in_use() -> None:
    """The devices have been used by virtual ranks: what that takes once stays taken."""
    World.local(2, devices(2)).run(lambda world: SymmetricBuffer(world, targets.pick(), 64).close(), timeout=60)


@pytest.fixture
def leak_free(in_use: None) -> Iterator[None]:
    """The test leaves nothing: no mapping, name or descriptor on the host, no block of memory on a GPU."""
    before = _footprint()
    yield
    after = _footprint()
    if targets.current().name == "host":
        assert after == before
    else:
        assert all(after[name] < before[name] + _BLOCK for name in before), (before, after)


def _footprint() -> dict[str, int]:
    runtime = targets.current().runtime
    if runtime.torch_device_type != "cpu":
        used = {}
        for device in range(runtime.device_count()):
            free, total = torch.cuda.mem_get_info(device)
            used[f"bytes on device {device}"] = total - free
        return used
    maps = Path("/proc/self/maps").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "names": len(names(os.getpid())),
        "mappings": maps.count(f"/flycomm.{os.getpid()}."),
    }
