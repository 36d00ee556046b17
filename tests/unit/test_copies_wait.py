# SPDX-License-Identifier: Apache-2.0
"""Where virtual ranks share a GPU, torch functions that copy between it and the host wait for the rank's stream."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests import ranks

COPIES = {
    "cpu": lambda gpu, cpu: gpu.cpu(),
    "to the host": lambda gpu, cpu: gpu.to("cpu"),
    "to the GPU": lambda gpu, cpu: cpu.to(gpu.device),
    "to the GPU, by name": lambda gpu, cpu: cpu.to(device="cuda:0"),
    "copied over": lambda gpu, cpu: gpu.copy_(cpu),
    "item": lambda gpu, cpu: gpu.sum().item(),
    "tolist": lambda gpu, cpu: gpu.tolist(),
    "a truth": lambda gpu, cpu: bool((gpu == 1).all()),
    "an int": lambda gpu, cpu: int(gpu.sum()),
    "equal": lambda gpu, cpu: torch.equal(gpu, gpu),
    "allclose": lambda gpu, cpu: torch.allclose(gpu, gpu),
    "same_bits": lambda gpu, cpu: ranks.same_bits(gpu, gpu),
    "a mask": lambda gpu, cpu: gpu[gpu > 0],
    "a list of indices": lambda gpu, cpu: gpu[[0, 2]],
    "a mask to write": lambda gpu, cpu: gpu.__setitem__(gpu > 0, 0.0),
    "values to write": lambda gpu, cpu: gpu.__setitem__(slice(3), cpu),
    "made of a list": lambda gpu, cpu: torch.tensor([1.0, 2.0], device=gpu.device),
}
OTHERS = {
    "another type": lambda gpu, cpu: gpu.to(torch.float16),
    "over itself": lambda gpu, cpu: gpu.copy_(gpu + 1),
    "arithmetic": lambda gpu, cpu: (gpu * 2 + 1).sum(),
    "a slice": lambda gpu, cpu: gpu[1:],
    "a number to write": lambda gpu, cpu: gpu.__setitem__(0, 7.0),
    "filled": lambda gpu, cpu: torch.full((3,), 2.0, device=gpu.device),
    "on the host": lambda gpu, cpu: (
        cpu.tolist(),
        torch.equal(cpu, cpu),
        cpu[cpu > 0],
        torch.tensor([1]),
        cpu.to("cpu"),
    ),
}


@pytest.mark.parametrize(
    ("call", "waits"),
    [*((one, True) for one in COPIES.values()), *((one, False) for one in OTHERS.values())],
    ids=[*COPIES, *OTHERS],
)
def test_copies_wait_and_nothing_else_does(call, waits, monkeypatch):
    waited = []
    monkeypatch.setattr(ranks, "settle", lambda: waited.append(1))
    with FakeTensorMode():
        cpu = torch.arange(3.0)
        gpu = torch.arange(3.0, device="cuda:0")
        with ranks.CopiesWait(), suppress(RuntimeError):  # of no GPU, after the wait
            call(gpu, cpu)
    assert bool(waited) == waits
