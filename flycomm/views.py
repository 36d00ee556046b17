# SPDX-License-Identifier: Apache-2.0
"""Tensors over memory that torch did not allocate."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

_CPU, _CUDA, _ROCM = 1, 2, 10  # DLDeviceType
_UNSIGNED = 1  # DLDataTypeCode


class _DLTensor(ctypes.Structure):
    """``DLManagedTensor`` of DLPack 0.8, the version that every torch reads."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _Exporter:
    """Gives torch an address and the device that *we* say it is for: a peer's memory, used from here."""

    def __init__(self, address: int, num_bytes: int, device_type: int, device_id: int):
        self._device = (device_type, device_id)
        self._shape = (ctypes.c_int64 * 1)(num_bytes)
        self._tensor = _DLTensor(address, device_type, device_id, 1, _UNSIGNED, 8, 1, self._shape, None, 0, None, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(ctypes.addressof(self._tensor), b"dltensor", None)


@cache  # torch looks at the struct until the last view is gone, which nobody tells us: keep it
def _exporter(address: int, num_bytes: int, device_type: int, device_id: int) -> _Exporter:
    return _Exporter(address, num_bytes, device_type, device_id)


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """A u8 tensor of ``num_bytes`` at ``address`` on ``device``. It owns nothing: the caller keeps the memory alive."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        exporter = _exporter(address, num_bytes, _CPU, 0)
    else:
        exporter = _exporter(address, num_bytes, _ROCM if torch.version.hip else _CUDA, device.index)
    return from_dlpack(exporter)
