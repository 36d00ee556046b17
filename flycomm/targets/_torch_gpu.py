# SPDX-License-Identifier: Apache-2.0
"""The runtime of the GPU targets: torch's own ``torch.cuda``, which is HIP in a ROCm build of torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flycomm.targets.base import Runtime

# What torch's public functions call in the end, in CUDA and ROCm builds alike, with no Stream object in between. Where
# there is none (in a CPU build, or if a later torch renames it) it is the public function.
_raw_stream = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
)
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class TorchGpuRuntime(Runtime):
    """Devices and streams as torch counts them, so that a user's ``torch.cuda.stream(...)`` blocks are respected."""

    torch_device_type = "cuda"

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def set_device(self, device: int) -> None:
        torch.cuda.set_device(device)

    def current_stream(self, device: int) -> int:
        return _raw_stream(device)

    def is_capturing(self, device: int) -> bool:
        if _current_device() == device:  # the usual case: changing the device twice costs microseconds
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()

    def synchronize(self, device: int) -> None:
        torch.cuda.synchronize(device)

    def hardware_queues(self) -> int:
        if torch.version.hip:
            return int(os.environ.get("GPU_MAX_HW_QUEUES", 4))
        return int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", 8))

    @contextmanager
    def rank_scope(self, device: int) -> Iterator[None]:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            yield

    def handle(self, stream: Any) -> int:
        return stream.cuda_stream

    def order(self, earlier: int | None, stream: Any, device: int) -> None:
        if earlier is None:
            return
        before = torch.cuda.ExternalStream(earlier, device=device) if earlier else torch.cuda.default_stream(device)
        stream.wait_event(before.record_event())
