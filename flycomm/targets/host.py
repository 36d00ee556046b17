# SPDX-License-Identifier: Apache-2.0
"""The host target: FlyDSL kernels on CPU cores, each GPU thread a fiber (``csrc_shim/host_runtime.c``)."""

from __future__ import annotations

import os
import platform
from typing import Any, ClassVar

from flydsl.compiler.backends import BaseBackend
from flydsl.compiler.backends.base import GPUTarget
from flydsl.runtime.device_runtime import DeviceRuntime

from flycomm import _shim, env
from flycomm.errors import TargetError
from flycomm.targets import _flydsl
from flycomm.targets._shim_memory import ShimMemory
from flycomm.targets.base import Availability, Capabilities, Runtime, Target

_ARCH = "x86-64"
_RUNTIME_ABI = "flycomm-host-1"  # raised whenever generated code and csrc_shim/host_runtime.h change together


def _target_of(warp_size: int) -> GPUTarget:
    """FlyDSL keeps one backend an ``arch``, so another warp size is another ``arch``."""
    return GPUTarget("host", _ARCH if warp_size == 32 else f"{_ARCH}-warp{warp_size}", warp_size)


class HostBackend(BaseBackend):
    """FlyDSL's compile backend ``host``."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "host"

    @staticmethod
    def detect_target() -> GPUTarget:
        return _target_of(env.HOST_WARP.get())

    @classmethod
    def make_target(cls, arch: str) -> GPUTarget:
        return _target_of(int(arch.rpartition("-warp")[2]) if "-warp" in arch else 32)

    @classmethod
    def llvm_address_space(cls, address_space: Any) -> int:
        return _flydsl.llvm_address_space(address_space)

    def lower_compile_hints(self, module: Any, *, compile_hints: dict) -> None:
        from flycomm.targets import _host_lowering

        with module.context, module.operation.location:
            _host_lowering.lower(module, warp_size=self.target.warp_size, weak=env.HOST_WEAK.get())

    def pipeline_fragments(self, *, compile_hints: dict) -> list[str]:
        from flycomm.targets import _host_lowering

        return list(_host_lowering.LAST_PASSES)

    def gpu_module_targets(self) -> list[str]:
        return []

    def hash(self) -> str:
        return f"{self.target} {_RUNTIME_ABI}"

    def jit_runtime_lib_basenames(self) -> list[str]:
        return [str(_shim.path()), "libmlir_c_runner_utils.so"]


class HostDeviceRuntime(DeviceRuntime):
    """FlyDSL's runtime kind ``host``: one device, the CPU."""

    kind: ClassVar[str] = "host"

    def device_count(self) -> int:
        return 1

    def current_device_id(self) -> int:
        return 0


# FlyDSL's entry points (flydsl.backends) find the backend without us; a runtime has none.
_flydsl.register_runtime("host", HostDeviceRuntime)


class HostRuntime(Runtime):
    """One device without streams; launches return when they are done."""

    torch_device_type: ClassVar[str] = "cpu"

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: int) -> None:
        return None

    def current_stream(self, device: int) -> int:
        return 0

    def is_capturing(self, device: int) -> bool:
        return False

    def synchronize(self, device: int) -> None:
        return None


class HostTarget(Target):
    """CPU cores of this machine."""

    name: ClassVar[str] = "host"

    def __init__(self) -> None:
        self.memory = ShimMemory(_shim.HOST)
        self.runtime = HostRuntime()

    def availability(self) -> Availability:
        if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
            return Availability(False, f"the host target needs Linux on x86-64, not {platform.platform()}")
        try:
            _shim.lib()
        except TargetError as error:
            return Availability(False, str(error))
        return Availability(True, f"{os.cpu_count()} cores")

    def capabilities(self, device: int) -> Capabilities:
        known = _shim.device_query(_shim.HOST, device) | {"warp_size": env.HOST_WARP.get()}
        return Capabilities(**known, graphs=False)

    def register(self) -> None:
        _flydsl.register("host", HostBackend, HostDeviceRuntime)
        _shim.lib().fc_host_set_threads(env.HOST_THREADS.get())
        self.set_weak_seed(env.HOST_SEED.get())
        self.set_order(env.HOST_ORDER.get())

    def set_weak_seed(self, seed: int) -> None:
        """Choose the order in which kept-back stores land, from the next launch on; nothing is compiled again."""
        _shim.lib().fc_host_set_weak_seed(seed % 2**64)

    def set_order(self, order: str) -> None:
        """Choose which warp of a block runs on first after a block barrier, from the next launch on: one of
        ``env.HOST_ORDERS``. All but "fair" find a barrier that is missing where warps run apart."""
        _shim.lib().fc_host_set_order(env.HOST_ORDERS.index(order))

    def raise_pending(self) -> None:
        """Raise :class:`TargetError` if a launch of this OS thread failed since the last call."""
        message = _shim.lib().fc_host_take_error()
        if message is not None:
            raise TargetError(message.decode())

    def preload(self, compiled: Any, device: int) -> None:
        _flydsl.preload(compiled)


TARGET = HostTarget()
