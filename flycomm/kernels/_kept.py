# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels from one process to the next, without tracing them again.

FlyDSL's disk cache finds compiled code by the traced program, so every process traces a kernel before it finds it: that
is most of the time that a first call takes. What flycomm's own kernels compile to follows from flycomm's sources, the
specialization and the target, so they are kept by these, in FlyDSL's cache folder (``FLYDSL_RUNTIME_CACHE_DIR``; off
with ``FLYDSL_RUNTIME_ENABLE_CACHE=0``). Kernels of others are not: nobody knows what their sources are.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from flycomm import env
from flycomm.kernels import _flydsl

if TYPE_CHECKING:
    from flycomm.kernels._specialization import Specialization

_FOLDER = "flycomm"  # beside those of FlyDSL, which are named like functions
_PACKAGE = Path(__file__).resolve().parents[1]


def load(specialization: Specialization) -> Any:
    """The launch handle of a specialization that some process has kept; None if none has."""
    manager = _flydsl.cache(_FOLDER)
    text = None if manager is None else _text(specialization)
    artifact = None if text is None else manager.get(_flydsl.cache_key(text))
    if artifact is None:
        return None
    return _flydsl.handle_of(artifact, specialization.launcher(), specialization.placeholders())


def keep(specialization: Specialization, handle: Any) -> None:
    """Keep the handle's code for :func:`load`, if it may be. A full disk costs the next process a trace, no more."""
    manager = _flydsl.cache(_FOLDER)
    text = None if manager is None else _text(specialization)
    if text is None:
        return
    with suppress(OSError), manager.compile_lock(_flydsl.cache_key(text)) as (_, write):  # removes an unreadable file
        if write is not None:
            write(_flydsl.artifact_of(handle))


def _text(specialization: Specialization) -> str | None:
    """Everything of ours that compiled code depends on; None for a kernel that is not ours."""
    text = described(specialization)
    return None if text is None else f"{text} {[os.environ.get(variable.name, '') for variable in env.ALL]}"


def described(specialization: Specialization) -> str | None:
    """The same, but for what the environment says."""
    try:
        build = _described(specialization.build)
    except _NotOursError:
        return None
    s = specialization
    fixed = (s.world, s.dtype, s.blocks, s.threads, s.resident_threads, s.traced)
    return f"{_sources()} {build} {fixed}"


class _NotOursError(Exception):
    """Compiled code depends on something else than flycomm's sources and constants."""


def _described(value: Any) -> str:
    """A function of flycomm's by its name and what it was made with, a record by its fields, a constant by itself."""
    if value is None or isinstance(value, str | int | float | bool):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_described, value))})"
    if is_dataclass(value) and type(value).__module__.startswith("flycomm."):
        return type(value).__name__ + _described(tuple(getattr(value, one.name) for one in fields(value)))
    if not isinstance(value, FunctionType) or not value.__module__.startswith("flycomm."):
        raise _NotOursError
    made_with = [cell.cell_contents for cell in value.__closure__ or ()]
    made_with += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return f"{value.__module__}.{value.__qualname__}({', '.join(map(_described, made_with))})"


@cache
def _sources() -> str:
    """A hash of all of flycomm's Python: a kernel is traced through many files, and these are read in milliseconds."""
    found = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        found.update(f"{path.relative_to(_PACKAGE)} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
