# SPDX-License-Identifier: Apache-2.0
"""One compiled form of a kernel: everything that is fixed when it is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import flydsl.compiler as flyc
from flydsl.compiler import get_backend

from flycomm import targets
from flycomm.kernels import _ahead, _flydsl, _kept
from flycomm.primitives import trace


@dataclass(frozen=True)
class Specialization:
    """A kernel file's ``build`` applied to a world size, an element type and a geometry, never to a length.

    ``build(world, dtype, blocks, threads)`` returns ``(launcher, placeholders)``: a ``@flyc.jit`` function, and
    arguments that compile it without running it.
    """

    kernel: str  # "all_reduce_one_shot"
    build: Callable[..., tuple[Any, tuple[Any, ...]]]
    world: int  # ranks
    dtype: str  # a name of dtypes.REDUCIBLE; "" where a kernel moves no data
    blocks: int
    threads: int  # a block
    resident_threads: int = 0  # that a compute unit must be able to hold of it, a multiple of 256; 0: no demand
    traced: bool = False  # whether its blocks record what they do (primitives/trace.py)

    @property
    def name(self) -> str:
        """Unique among :data:`flycomm.kernels.SHIPPED`; used in file names and tables."""
        traced = "traced" if self.traced else ""
        return "_".join(
            filter(None, (self.kernel, self.dtype, f"w{self.world}", f"{self.blocks}x{self.threads}", traced))
        )

    def launcher(self) -> Any:
        return self._built()[0]

    def placeholders(self) -> tuple[Any, ...]:
        return self._built()[1]

    def _built(self) -> tuple[Any, tuple[Any, ...]]:
        return _build(self, get_backend().target.warp_size)


@cache
def _build(specialization: Specialization, wave: int) -> tuple[Any, tuple[Any, ...]]:
    """For a chip with ``wave`` threads in a wave."""
    s = specialization
    launcher, placeholders = s.build(s.world, s.dtype, s.blocks, s.threads)
    if s.resident_threads:
        launcher.compile_hints["waves_per_eu"] = s.resident_threads // (wave * targets.EXECUTION_UNITS)
    return launcher, placeholders


_handles: dict[tuple[Specialization, int], Any] = {}  # and the place of its module (Target.module_place)


def compiled(specialization: Specialization) -> Any:
    """The launch handle of a specialization on the active target; compiles (or takes from the disk cache) once.

    On rocm it is for the device that is current: there a module is one device's. Calling the handle takes positional
    arguments as the kernel file documents them and costs microseconds; a caller that launches often fixes most of them
    with :func:`flycomm.kernels.bind`.
    """
    key = specialization, targets.active().module_place()
    handle = _handles.get(key)
    if handle is None:
        with targets.compile_lock:  # virtual ranks are threads: one compiles, the others find it done
            handle = _handles.get(key)
            if handle is None:
                handle = _again(specialization) or _ahead.load(specialization) or _kept.load(specialization)
                handle = handle or _compile(specialization)
                _handles[key] = handle
    return handle


def _again(specialization: Specialization) -> Any:
    """A handle of what was compiled for another device of this process; None if nothing was."""
    other = next((handle for (known, _), handle in list(_handles.items()) if known == specialization), None)
    if other is None:
        return None
    artifact = _flydsl.copy_of(_flydsl.artifact_of(other))
    return _flydsl.handle_of(artifact, specialization.launcher(), specialization.placeholders())


def _compile(specialization: Specialization) -> Any:
    with trace.compiled_in(specialization.traced):
        handle = flyc.compile(specialization.launcher(), *specialization.placeholders())
    _kept.keep(specialization, handle)
    return handle
