# SPDX-License-Identifier: Apache-2.0
"""The targets, and which one this process runs on.

One process *runs* one target: FlyDSL resolves its runtime libraries once. Compiling for another
(:func:`compiling_for`) needs no runtime and is always possible.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from flycomm import env
from flycomm.errors import TargetError, UsageError
from flycomm.targets.base import Availability, Capabilities, MappedMemory, Memory, Runtime, Target
from flycomm.targets.chips import CHIPS, EXECUTION_UNITS

NAMES = ("rocm", "cuda", "host")  # in the order in which `pick` tries them

_FLYDSL_BACKEND = "FLYDSL_COMPILE_BACKEND"
_FLYDSL_RUNTIME = "FLYDSL_RUNTIME_KIND"
compile_lock = threading.RLock()
_active: Target | None = None


@cache
def get(name: str) -> Target:
    """The target of that name. Raises :class:`UsageError` for a name that is not in :data:`NAMES`."""
    if name not in NAMES:
        raise UsageError(f"target {name!r} is not one of {', '.join(NAMES)}; pass one of these or leave it out")
    return importlib.import_module(f"flycomm.targets.{name}").TARGET


def pick(name: str | None = None) -> Target:
    """The target asked for (argument, then ``FLYCOMM_TARGET``), or the first that can run here."""
    asked = name or env.TARGET.get()
    if asked:
        target = get(asked)
        found = target.availability()
        if not found.ok:
            raise TargetError(f"target {asked} cannot run here: {found.reason}")
        return target
    return next(target for target in map(get, NAMES) if target.availability().ok)


def activate(target: Target) -> None:
    """Make ``target`` the one that FlyDSL compiles for and runs on in this process."""
    global _active
    with compile_lock:
        if _active is target:
            return
        if _active is not None:
            raise TargetError(
                f"this process already runs on target {_active.name}, not {target.name}: one process runs one target; "
                "use another process"
            )
        target.register()
        os.environ.update(target.compile_environment() | target.run_environment())
        os.environ[_FLYDSL_BACKEND] = target.name
        os.environ[_FLYDSL_RUNTIME] = target.name
        _active = target


def active() -> Target:
    """The activated target; :func:`pick` and :func:`activate` happen now if nobody has chosen."""
    if _active is None:
        activate(pick())
    assert _active is not None
    return _active


def current() -> Target:
    """The activated target, or the one that :func:`active` would choose; nothing is activated."""
    return _active or pick()


def expect_virtual_ranks() -> None:
    """Say, before a driver starts, that ranks of this process may share a GPU. Changes nothing once CUDA has started.

    Left to itself, CUDA loads a kernel at its first launch. That can wait for kernels that run, and one of those may be
    waiting for this very launch. Kernels of ours are preloaded, so this is about torch's.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


@contextmanager
def compiling_for(name: str, arch: str = "") -> Iterator[None]:
    """Within the block, FlyDSL compiles for target ``name`` (and chip ``arch``); nothing it compiles may run here.

    Holds a lock: FlyDSL reads its choice from the process environment, which is as before afterwards. Raises
    :class:`TargetError` when a tool that the target compiles with is missing.
    """
    settings = {_FLYDSL_BACKEND: name, _FLYDSL_RUNTIME: name, "COMPILE_ONLY": "1"}
    if arch:
        settings |= {"ARCH": arch, "FLYDSL_GPU_ARCH": arch}
    with compile_lock:
        target = get(name)
        target.register()
        settings |= target.compile_environment()
        before = {key: os.environ.get(key) for key in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for key, value in before.items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value


__all__ = [
    "CHIPS",
    "EXECUTION_UNITS",
    "NAMES",
    "Availability",
    "Capabilities",
    "MappedMemory",
    "Memory",
    "Runtime",
    "Target",
    "activate",
    "active",
    "compiling_for",
    "current",
    "expect_virtual_ranks",
    "get",
    "pick",
]
