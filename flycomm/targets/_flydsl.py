# SPDX-License-Identifier: Apache-2.0
"""What the targets share in talking to FlyDSL's registries."""

from __future__ import annotations

from typing import Any

from flydsl.compiler import backends
from flydsl.compiler.backends import BaseBackend
from flydsl.runtime import device_runtime
from flydsl.runtime.device_runtime import DeviceRuntime

# FlyDSL's own list for rocm up to here leaves nothing of AMD in target-neutral code: gpu, scf, arith, vector and llvm.
FIRST_PASSES = (
    "fly-rewrite-func-signature",
    "fly-canonicalize",
    "fly-rocdl-expand-ops",
    "fly-layout-lowering",
    "fly-int-swizzle-simplify",
    "canonicalize",
    "fly-convert-atom-call-to-ssa-form",
    "fly-promote-regmem-to-vectorssa",
    "convert-fly-to-rocdl",
    "canonicalize",
)


def register_runtime(name: str, runtime: type[DeviceRuntime]) -> None:
    """Make FlyDSL know a runtime kind, and that the compile backend of the same name runs on it; safe to call again.

    ``register_device_runtime`` would make the class *the* runtime of the process, and FlyDSL would then refuse to
    compile for rocm here. Entering it among the kinds that ``FLYDSL_RUNTIME_KIND`` selects leaves the others usable;
    there is no public function for that.
    """
    device_runtime._builtin_runtimes[name] = runtime
    device_runtime.register_compile_runtime_mapping(name, name)


def register(name: str, backend: type[BaseBackend], runtime: type[DeviceRuntime]) -> None:
    """Make FlyDSL know a compile backend and the runtime kind of the same name; safe to call again."""
    backends.register_backend(name, backend, force=True)
    register_runtime(name, runtime)


def llvm_address_space(address_space: Any) -> int:
    """LLVM's number of a FlyDSL address space, which AMDGPU and NVPTX share."""
    from flydsl._mlir.dialects.fly import AddressSpace

    numbers = {AddressSpace.Generic: 0, AddressSpace.Global: 1, AddressSpace.Shared: 3, AddressSpace.Register: 5}
    return numbers[address_space]


def preload(compiled: Any) -> None:
    """Load a compiled kernel's code now; FlyDSL has no public way to do that without a launch."""
    compiled._keepalive._get_func_exe()
