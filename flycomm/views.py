# SPDX-License-Identifier: Apache-2.0
"""Tensors over memory that torch did not allocate."""

from __future__ import annotations

import ctypes

import torch


class _CudaArray:
    """The few fields of ``__cuda_array_interface__`` that torch reads; ROCm builds of torch read them too."""

    def __init__(self, address: int, num_bytes: int):
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """A u8 tensor of ``num_bytes`` at ``address`` on ``device``. It owns nothing: the caller keeps the memory alive."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_CudaArray(address, num_bytes), device=device)
