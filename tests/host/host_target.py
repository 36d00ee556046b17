# SPDX-License-Identifier: Apache-2.0
"""What the tests of the host target share: the mark that skips them elsewhere, and kernel helpers."""

from __future__ import annotations

import os
from typing import Any

import flydsl.expr as fx
import pytest
import torch

from flycomm import targets

only_host = pytest.mark.skipif(os.environ.get("FLYCOMM_TARGET") != "host", reason="about the host target itself")


def activate() -> Any:
    """The host target, made the one that this process runs."""
    target = targets.get("host")
    targets.activate(target)
    return target


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
