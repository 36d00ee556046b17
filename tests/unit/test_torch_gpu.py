# SPDX-License-Identifier: Apache-2.0
"""The GPU targets' questions to torch, answered by a torch that is not there."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from flycomm.targets import _torch_gpu


@pytest.fixture
def current(monkeypatch):
    """The current device, in a list; its streams capture on devices 1 and 3."""
    device = [0]

    @contextmanager
    def on(index):
        before, device[0] = device[0], index
        yield
        device[0] = before

    monkeypatch.setattr(_torch_gpu, "_current_device", lambda: device[0])
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device[0] in (1, 3))
    return device


@pytest.mark.parametrize("here", range(4))
@pytest.mark.parametrize("asked", range(4))
def test_capturing_is_of_the_device_that_is_asked_about(current, here, asked):
    current[0] = here
    assert _torch_gpu.TorchGpuRuntime().is_capturing(asked) == (asked in (1, 3))
    assert current[0] == here


def test_the_current_device_is_not_changed_without_need(current, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", None)
    current[0] = 3
    assert _torch_gpu.TorchGpuRuntime().is_capturing(3)


@pytest.fixture
def reloaded(monkeypatch):
    """Import the module again, with what the test has put into torch; and as it was, afterwards."""
    yield lambda: importlib.reload(_torch_gpu)
    monkeypatch.undo()
    importlib.reload(_torch_gpu)


def test_the_stream_comes_from_torch_itself(reloaded, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0x1000 + device, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", None)
    assert reloaded().TorchGpuRuntime().current_stream(2) == 0x1002


def test_a_torch_without_raw_streams(reloaded, monkeypatch):
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    monkeypatch.delattr(torch._C, "_cuda_getDevice", raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0x2000 + device))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    runtime = reloaded().TorchGpuRuntime()
    assert runtime.current_stream(2) == 0x2002
    assert runtime.is_capturing(2)
