# SPDX-License-Identifier: Apache-2.0
"""What the tests of the host target share: its activation, its shared memory, and kernel helpers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flydsl.expr as fx
import torch

from flycomm import targets

SHM = Path("/dev/shm")


def activate() -> Any:
    """The host target, made the one that this process runs."""
    target = targets.get("host")
    targets.activate(target)
    return target


def names(pid: int) -> list[str]:
    """The shared memory of process ``pid`` that other processes can see."""
    return [path.name for path in SHM.glob(f"flycomm.{pid}.*")]


def pointer(address: Any, dtype: Any) -> Any:
    """In a kernel: a global pointer to ``dtype`` at an i64 address."""
    return fx.inttoptr(fx.PointerType.get(dtype.ir_type, fx.AddressSpace.Global, dtype.width // 8), address)


def load(address: Any, index: Any, dtype: Any) -> Any:
    """In a kernel: element ``index`` (i32) of the array at ``address``."""
    return fx.generic_load(pointer(address + fx.Int64(index) * (dtype.width // 8), dtype), dtype=dtype)


def store(address: Any, index: Any, value: Any) -> None:
    """In a kernel: store element ``index`` (i32) of the array at ``address``."""
    fx.generic_store(pointer(address + fx.Int64(index) * (value.dtype.width // 8), value.dtype), value)


def at(tensor: torch.Tensor) -> Any:
    """A tensor's address as a kernel argument."""
    return fx.Int64(tensor.data_ptr())
