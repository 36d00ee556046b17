# SPDX-License-Identifier: Apache-2.0
"""AMD GPUs: FlyDSL's own rocm backend and runtime, HIP memory through the shim, streams through a ROCm torch."""

from __future__ import annotations

import os
from typing import Any

import torch

from flycomm import _shim
from flycomm.errors import TargetError
from flycomm.targets import _flydsl, _hip_runtime, _rocm_toolkit
from flycomm.targets._shim_memory import ShimMemory
from flycomm.targets._torch_gpu import TorchGpuRuntime
from flycomm.targets.base import Availability, Capabilities, Target

_ARCH_VARIABLES = ("FLYDSL_GPU_ARCH", "ARCH", "HSA_OVERRIDE_GFX_VERSION")  # of FlyDSL; whoever sets one decides


class RocmTarget(Target):
    """Compiles anywhere; runs where torch is a ROCm build, HIP finds a device, and a linker for code objects exists."""

    name = "rocm"

    def __init__(self) -> None:
        self.memory = ShimMemory(_shim.HIP)
        self.runtime = TorchGpuRuntime()

    def availability(self) -> Availability:
        if torch.version.hip is None:
            return Availability(False, f"torch {torch.__version__} is not a ROCm build; install one from pytorch.org")
        try:
            _shim.open_driver(_shim.HIP)
            devices = _shim.device_count(_shim.HIP)
            _hip_runtime.library()
            _rocm_toolkit.find_linker()
        except TargetError as missing:
            return Availability(False, str(missing))
        if devices == 0:
            return Availability(False, "HIP finds no device; check that this user may open /dev/kfd and /dev/dri")
        return Availability(True, f"HIP finds {devices} device{'s' if devices > 1 else ''}")

    def capabilities(self, device: int) -> Capabilities:
        return Capabilities(**_shim.device_query(_shim.HIP, device), graphs=True)

    def register(self) -> None:
        """Nothing to do: FlyDSL brings this backend."""

    def compile_environment(self) -> dict[str, str]:
        return {"ROCM_PATH": str(_rocm_toolkit.root())}

    def run_environment(self) -> dict[str, str]:
        """The chip, as HIP names it: FlyDSL asks a tool of ROCm's, and takes gfx942 where that is not installed."""
        if any(os.environ.get(name) for name in _ARCH_VARIABLES):
            return {}
        return {_ARCH_VARIABLES[0]: str(_shim.device_query(_shim.HIP, 0)["arch"])}

    def module_place(self) -> int:
        """A HIP module is its device's: the runtime ends a process that launches it on another."""
        return self.runtime.current_device()

    def raise_pending(self) -> None:
        """Raise :class:`TargetError` if a load or a launch of this thread failed since the last call."""
        if message := _hip_runtime.take_error():
            raise TargetError(f"HIP refused to load or to launch a kernel: {message}")

    def preload(self, compiled: Any, device: int) -> None:
        with torch.cuda.device(device):
            _flydsl.preload(compiled)
        self.raise_pending()


TARGET = RocmTarget()
