# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled ahead of time: written by ``python -m flycomm compile``, found through ``FLYCOMM_AOT_DIR``.

A file holds what FlyDSL needs to launch a kernel without tracing or compiling it, behind a line that says what it was
made from: this flycomm, this FlyDSL, the specialization and the chip. What does not agree is not used. Other than
FlyDSL's cache, a folder may come from another machine: neither the environment nor the tools there have to be alike.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import re
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flydsl.compiler import get_backend

from flycomm import env
from flycomm.errors import UsageError
from flycomm.kernels import _flydsl, _kept

if TYPE_CHECKING:
    from flycomm.kernels._specialization import Specialization

logger = logging.getLogger("flycomm")

SUFFIX = ".kernel"
_said: set[str] = set()


def keep(specialization: Specialization, folder: Path) -> str:
    """Write what the launcher of a specialization was just compiled to, for the chip in force; returns the file's name.

    Empty for a kernel that is not flycomm's: nobody knows what it depends on.
    """
    key = _key(specialization)
    if key is None:
        return ""
    path = folder / _name(specialization)
    path.write_bytes(f"{key}\n".encode() + pickle.dumps(_flydsl.last_artifact(specialization.launcher())))
    return path.name


def load(specialization: Specialization) -> Any:
    """The launch handle of a specialization from the folder ``FLYCOMM_AOT_DIR``; None if it has none, or another's.

    The files are Python pickles: name a folder only if you trust who wrote it. Raises :class:`UsageError` if the
    variable names no folder, or a file in it is damaged.
    """
    named = env.AOT_DIR.get()
    if not named or specialization.traced or get_backend().target.backend == "host":
        return None  # host compiles for its weak mode, too
    key = _key(specialization)
    if key is None:
        return None
    folder = Path(named)
    if not folder.is_dir():
        raise UsageError(f"{env.AOT_DIR.name}={named} is not a folder; make it with python -m flycomm compile")
    path = folder / _name(specialization)
    if not path.is_file():
        _say_once(f"{env.AOT_DIR.name}={named} has no {path.name}; it is compiled here")
        return None
    found, _, data = path.read_bytes().partition(b"\n")
    if found.decode(errors="replace") != key:
        _say_once(f"{path} was made by another flycomm or FlyDSL; it is compiled here. Make the folder again")
        return None
    try:
        artifact = pickle.loads(data)
    except (pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
        raise UsageError(
            f"{path} is damaged ({error}); make the folder again with python -m flycomm compile"
        ) from error
    return _flydsl.handle_of(artifact, specialization.launcher(), specialization.placeholders())


def _name(specialization: Specialization) -> str:
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", specialization.name)
    return f"{plain}.{get_backend().target.arch}{SUFFIX}"


def _key(specialization: Specialization) -> str | None:
    text = _kept.described(specialization)
    if text is None:
        return None
    return hashlib.sha256(f"{version('flydsl')} {get_backend().target} {text}".encode()).hexdigest()


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.warning("%s", message)
