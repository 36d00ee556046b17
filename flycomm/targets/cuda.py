# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs: FlyDSL kernels as PTX, launched by ``csrc_shim/cuda_runtime.c``, streams through a CUDA build of torch.

PTX is kept in FlyDSL's disk cache (``FLYDSL_RUNTIME_CACHE_DIR``). The driver assembles it when it is loaded, and keeps
the machine code in a disk cache of its own (``CUDA_CACHE_PATH``, off with ``CUDA_CACHE_DISABLE=1``), which knows when
another driver or chip needs it anew.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from flydsl.compiler.backends import BaseBackend
from flydsl.compiler.backends.base import GPUTarget
from flydsl.runtime.device_runtime import DeviceRuntime
from flydsl.utils import env as flydsl_env

from flycomm import _shim, env
from flycomm.errors import TargetError
from flycomm.targets import _flydsl
from flycomm.targets._shim_memory import ShimMemory
from flycomm.targets._torch_gpu import TorchGpuRuntime
from flycomm.targets.base import Availability, Capabilities, Target
from flycomm.targets.chips import EXECUTION_UNITS

_WARP = 32  # threads
# By compute capability, the oldest PTX version that knows the chip and has what we use: older drivers assemble it too.
_PTX = {80: 80, 86: 80, 87: 80, 89: 80, 90: 80, 100: 86, 101: 86, 103: 88, 110: 90, 120: 87, 121: 88}


def chip(capability: int) -> str:
    """The chip to compile for, for a device of that compute capability (90 for 9.0): its own, or the next older.

    PTX for one chip runs on every newer one, unless it has what no other chip has. Raises :class:`TargetError` for a
    device that is too old.
    """
    known = [number for number in _PTX if number <= capability]
    if not known:
        raise TargetError(f"compute capability {capability / 10} is below {min(_PTX) / 10}; use a newer GPU")
    return f"sm_{max(known)}"


def features(arch: str) -> str:
    """The PTX version, as LLVM writes it, for a chip such as ``sm_90`` or ``sm_90a``."""
    number = arch.removeprefix("sm_").rstrip("af")
    if not number.isdigit() or int(number) not in _PTX:
        raise TargetError(f"chip {arch!r} is not one of {', '.join(f'sm_{n}' for n in _PTX)}; set ARCH to one of these")
    return f"+ptx{_PTX[int(number)]}"


def _ask_for_queues() -> None:
    """With the default of 8, streams of virtual ranks would share queues, and a kernel that waits for another rank's
    would keep it from starting. Read when a context is made, so it has to be said first."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


@cache
def _arch_of(device: int) -> str:
    return chip(int(_shim.device_query(_shim.CUDA, device)["arch"].removeprefix("sm_")))


@cache
def _libdevice() -> str:
    from flycomm.targets import _cuda_math

    return _cuda_math.find_libdevice()


class CudaBackend(BaseBackend):
    """FlyDSL's compile backend ``cuda``; ``ARCH`` names a chip, otherwise it is the current device's."""

    _chip = ""  # that the module needs which was lowered last

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cuda"

    @staticmethod
    def detect_target() -> GPUTarget:
        """Also where an error of an earlier launch of this thread surfaces, if nobody has asked for it."""
        if not flydsl_env.compile.compile_only:
            TARGET.raise_pending()
        if flydsl_env.compile.arch:
            return CudaBackend.make_target(flydsl_env.compile.arch)
        try:
            arch = _arch_of(CudaDeviceRuntime().current_device_id())
        except TargetError as error:
            raise TargetError(f"there is no chip to compile for ({error}); name one, as in ARCH=sm_90") from error
        return CudaBackend.make_target(arch)

    @classmethod
    def make_target(cls, arch: str) -> GPUTarget:
        return GPUTarget(backend="cuda", arch=arch, warp_size=_WARP)

    @classmethod
    def llvm_address_space(cls, address_space: Any) -> int:
        return _flydsl.llvm_address_space(address_space)

    def lower_compile_hints(self, module: Any, *, compile_hints: dict) -> None:
        from flycomm.targets import _cuda_lowering

        with module.context, module.operation.location:
            warps = int(compile_hints.get("waves_per_eu") or 0)
            _cuda_lowering.lower(module, libdevice=bool(_libdevice()), resident_threads=warps * _WARP * EXECUTION_UNITS)
            self._chip = _cuda_lowering.chip_of(module, self.target.arch)

    def pipeline_fragments(self, *, compile_hints: dict) -> list[str]:
        from flycomm.targets import _cuda_lowering, _cuda_math

        arch = self.target.arch
        return _cuda_lowering.last_passes(self._chip or arch, features(arch), _libdevice(), str(_cuda_math.TOOLKIT))

    def gpu_module_targets(self) -> list[str]:
        return []  # nvvm-attach-target sets the one that counts

    def toolkit_fingerprint(self) -> str:
        found = _libdevice()
        return f"libdevice:{hashlib.sha256(Path(found).read_bytes()).hexdigest()}" if found else ""

    def jit_runtime_lib_basenames(self) -> list[str]:
        # the interface says names, FlyDSL joins them to its folder as paths: an absolute one stays what it is
        return [str(_shim.path()), "libmlir_c_runner_utils.so"]


class CudaDeviceRuntime(DeviceRuntime):
    """FlyDSL's runtime kind ``cuda``."""

    kind: ClassVar[str] = "cuda"

    def device_count(self) -> int:
        return _shim.device_count(_shim.CUDA)

    def current_device_id(self) -> int:
        import torch

        # asking torch would make a context on device 0, which a process that only compiles does not want
        return torch.cuda.current_device() if torch.cuda.is_initialized() else 0


class CudaTarget(Target):
    """Compiles anywhere (PTX needs no toolkit); runs where torch is a CUDA build and the driver finds a device."""

    name: ClassVar[str] = "cuda"

    def __init__(self) -> None:
        self.memory = ShimMemory(_shim.CUDA)
        self.runtime = TorchGpuRuntime()
        self._early: Counter[bool] = Counter()  # how many allow early starts, and how many forbid them
        self._early_lock = threading.Lock()

    def availability(self) -> Availability:
        import torch

        if torch.version.cuda is None:
            return Availability(False, f"torch {torch.__version__} is not a CUDA build; install one from pytorch.org")
        _ask_for_queues()
        try:
            _shim.open_driver(_shim.CUDA)
            devices = _shim.device_count(_shim.CUDA)
            archs = [_arch_of(device) for device in range(devices)]
        except TargetError as missing:
            return Availability(False, str(missing))
        if not torch.cuda.is_available():
            return Availability(
                False, f"torch's CUDA {torch.version.cuda} does not start here; its driver may be too old"
            )
        return Availability(True, f"CUDA finds {devices} device{'s' if devices > 1 else ''} ({', '.join(archs)})")

    def capabilities(self, device: int) -> Capabilities:
        return Capabilities(**_shim.device_query(_shim.CUDA, device), graphs=True)

    def register(self) -> None:
        _ask_for_queues()
        _flydsl.register("cuda", CudaBackend, CudaDeviceRuntime)

    def raise_pending(self) -> None:
        """Raise :class:`TargetError` if a launch of this thread failed since the last call."""
        message = _shim.lib().fc_cuda_take_error()
        if message is not None:
            raise TargetError(message.decode(errors="replace"))

    def preload(self, compiled: Any, device: int) -> None:
        """Load every kernel that this process has launchers for, ``compiled`` among them, onto ``device``.

        Waits for nothing once they are loaded. Loading can wait for kernels that run, so it comes before the first
        launch that may wait for a peer, and before a stream is captured.
        """
        _flydsl.preload(compiled)  # makes the launcher's code, which names its module to the shim
        _shim.check(_shim.lib().fc_cuda_preload(device))

    def start_early(self, allowed: bool) -> Callable[[], None]:
        self._count_early(allowed, 1)
        return lambda: self._count_early(allowed, -1)

    def _count_early(self, allowed: bool, change: int) -> None:
        with self._early_lock:
            self._early[allowed] += change
            early = env.PDL.get() and self._early[True] > 0 and self._early[False] == 0
            _shim.lib().fc_cuda_start_early(early)

    def resident_blocks(self, compiled: Any) -> int:
        """How many blocks of a compiled kernel fit on one multiprocessor of the current device together."""
        try:
            return compiled.max_blocks_per_cu()
        except RuntimeError as error:
            self.raise_pending()
            raise TargetError(str(error)) from error


TARGET = CudaTarget()
_flydsl.register_runtime("cuda", CudaDeviceRuntime)  # for those who choose by FlyDSL's own variables
