# SPDX-License-Identifier: Apache-2.0
"""The parts of a ROCm torch that flycomm asks for, over the stand-in HIP runtime: ``install()`` before flycomm.

torch here is a CPU build. It gets a HIP version and the public functions of ``torch.cuda`` that
``flycomm/targets/_torch_gpu.py`` calls; tensors stay on the CPU, where the stand-in's kernels can reach them. Their
memory must outlive the kernels: keep inputs and outputs, and ``torch.cuda.synchronize()`` before looking at them.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SONAME = "libamdhip64.so.7"
_hip: Any = None


class Counts(ctypes.Structure):
    """``struct counts`` of standin.h."""

    _fields_ = tuple(
        (name, ctypes.c_int) for name in ("allocated", "opened", "mapped", "modules", "streams", "launches")
    )


class Stream:
    def __init__(self, device: int | None = None):
        handle = ctypes.c_void_p()
        with _device(_get() if device is None else device):
            _check(_hip.hipStreamCreate(ctypes.byref(handle)))
        self.cuda_stream = handle.value


class _Current:
    def __init__(self, handle: int):
        self.cuda_stream = handle


def counts() -> Counts:
    return Counts.in_dll(_hip, "standin_counts")


def install() -> None:
    """Load the stand-in as torch loads HIP: first of all, and for everybody (``STANDIN_TORCH_HIP``: another file)."""
    global _hip
    _hip = ctypes.CDLL(os.environ.get("STANDIN_TORCH_HIP") or SONAME, mode=ctypes.RTLD_GLOBAL)
    torch.version.hip = "7.0.0-standin"
    replaced = {
        "is_available": lambda: True,
        "device_count": _count,
        "current_device": _get,
        "set_device": lambda device: _check(_hip.hipSetDevice(int(device))),
        "current_stream": lambda device=None: _Current(_local.streams.get(_get() if device is None else device, 0)),
        "is_current_stream_capturing": lambda: False,
        "synchronize": _synchronize,
        "device": _device,
        "stream": _stream,
        "Stream": Stream,
    }
    for name, function in replaced.items():
        setattr(torch.cuda, name, function)

    from flycomm import targets

    targets.get("rocm").runtime.torch_device_type = "cpu"  # where this torch has its tensors


class _Local(threading.local):
    def __init__(self) -> None:
        self.streams: dict[int, int] = {}


_local = _Local()


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"HIP error {code}")


def _count() -> int:
    count = ctypes.c_int()
    _check(_hip.hipGetDeviceCount(ctypes.byref(count)))
    return count.value


def _get() -> int:
    device = ctypes.c_int()
    _check(_hip.hipGetDevice(ctypes.byref(device)))
    return device.value


def _synchronize(device: int | None = None) -> None:
    with _device(_get() if device is None else device):
        for handle in {0, _local.streams.get(_get(), 0)}:
            _check(_hip.hipStreamSynchronize(ctypes.c_void_p(handle)))


@contextmanager
def _device(device: int) -> Iterator[None]:
    before = _get()
    _check(_hip.hipSetDevice(device))
    try:
        yield
    finally:
        _check(_hip.hipSetDevice(before))


@contextmanager
def _stream(stream: Stream) -> Iterator[None]:
    before = dict(_local.streams)
    _local.streams[_get()] = stream.cuda_stream
    try:
        yield
    finally:
        _local.streams = before
