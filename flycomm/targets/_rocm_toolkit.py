# SPDX-License-Identifier: Apache-2.0
"""The toolkit folder that FlyDSL's rocm backend compiles with: an installed ROCm, or a small stand-in for one.

MLIR wants two things of ``$ROCM_PATH``: ``amdgcn/bitcode/`` (it may be empty as long as no kernel calls the device
libraries) and ``llvm/bin/ld.lld``. Any LLD that knows code object v6 will do, so a stand-in is a folder in the
user's cache with an empty ``bitcode`` and a link to such a linker.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flycomm.errors import TargetError

MIN_LLD = 19  # LLD 18 refuses code object v6 with "unknown abi version"

_REMEDY = (
    "install one, e.g. `pip install ziglang` (it brings ld.lld) or your distribution's lld, or set ROCM_PATH to a ROCm"
)
_ROOT_VARIABLES = ("ROCM_PATH", "ROCM_ROOT", "ROCM_HOME")  # the names MLIR reads, in its order
_DEFAULT_ROOT = "/opt/rocm"
_SYSTEM_LLVM = "/usr/lib"  # Debian's and Ubuntu's place for llvm-19/bin and the like


@dataclass(frozen=True)
class Linker:
    """A linker for AMD code objects: the words before its arguments, and the LLD version that it reports."""

    command: tuple[str, ...]
    version: str


def find_linker() -> Linker:
    """The first LLD of at least :data:`MIN_LLD`: ROCm's own, on ``PATH``, under ``/usr/lib``, from ``ziglang``.

    Raises :class:`TargetError` naming what was found too old, and how to get one.
    """
    return _find_linker(_roots(), os.environ.get("PATH", ""))


def root() -> Path:
    """A folder to use as ``ROCM_PATH``: the installed ROCm if it can link, else the stand-in, made on first use.

    Raises :class:`TargetError` when there is no linker.
    """
    linker = find_linker()
    bitcode = next((path for top in _roots() if (path := Path(top, "amdgcn", "bitcode")).is_dir()), None)
    for top in _roots():
        if linker.command == (str(_lld_of(top)),) and bitcode == Path(top, "amdgcn", "bitcode"):
            return Path(top)
    return _stand_in(linker, bitcode)


def _roots() -> tuple[str, ...]:
    return tuple(value for name in _ROOT_VARIABLES if (value := os.environ.get(name))) or (_DEFAULT_ROOT,)


def _lld_of(top: str) -> Path:
    return Path(top, "llvm", "bin", "ld.lld")


def _candidates(roots: tuple[str, ...], search_path: str) -> Iterator[tuple[str, ...]]:
    def number(path: Path) -> int:
        digits = re.findall(r"\d+", str(path))
        return int(digits[-1]) if digits else 0

    for top in roots:
        yield (str(_lld_of(top)),)
    folders = [Path(folder) for folder in search_path.split(os.pathsep) if folder]
    for folder in folders:
        yield (str(folder / "ld.lld"),)
    numbered = (path for folder in folders if folder.is_dir() for path in folder.glob("ld.lld-*"))
    for path in sorted(numbered, key=number, reverse=True):
        yield (str(path),)
    for path in sorted(Path(_SYSTEM_LLVM).glob("llvm-*/bin/ld.lld"), key=number, reverse=True):
        yield (str(path),)
    if (zig := _ziglang()) is not None:
        yield (str(zig), "ld.lld")


def _ziglang() -> Path | None:
    """The compiler in the PyPI package ``ziglang``; it is an LLD as well."""
    found = importlib.util.find_spec("ziglang")
    return None if found is None or found.origin is None else Path(found.origin).with_name("zig")


@cache
def _find_linker(roots: tuple[str, ...], search_path: str) -> Linker:
    too_old = []
    for command in _candidates(roots, search_path):
        if not os.access(command[0], os.X_OK):
            continue
        found = _version(command)
        if found is None:
            continue
        if int(found.split(".")[0]) >= MIN_LLD:
            return Linker(command, found)
        too_old.append(f"{command[0]} is LLD {found}")
    seen = f" ({', '.join(too_old)})" if too_old else ""
    raise TargetError(f"no linker for AMD code objects was found{seen}: LLD >= {MIN_LLD} is needed; {_REMEDY}")


def _version(command: tuple[str, ...]) -> str | None:
    try:
        answer = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"LLD (\d+(?:\.\d+)*)", answer.stdout)
    return found.group(1) if found else None


def _stand_in(linker: Linker, bitcode: Path | None) -> Path:
    key = hashlib.sha256("\0".join((*linker.command, linker.version, str(bitcode))).encode()).hexdigest()[:12]
    base = _cache_dir()
    folder = base / f"rocm-{key}"
    if _lld_of(str(folder)).exists():
        return folder
    # Filled under another name and renamed, so that processes that start together never see half a folder.
    building = Path(tempfile.mkdtemp(prefix="rocm-", dir=base))
    _fill(building, linker, bitcode)
    try:
        building.rename(folder)
    except OSError:
        if not _lld_of(str(folder)).exists():
            raise
        shutil.rmtree(building)
    return folder


def _fill(folder: Path, linker: Linker, bitcode: Path | None) -> None:
    (folder / "amdgcn").mkdir()
    if bitcode is None:
        (folder / "amdgcn" / "bitcode").mkdir()
    else:
        (folder / "amdgcn" / "bitcode").symlink_to(bitcode)
    lld = _lld_of(str(folder))
    lld.parent.mkdir(parents=True)
    if len(linker.command) == 1:
        lld.symlink_to(linker.command[0])
    else:
        lld.write_text(f'#!/bin/sh\nexec {shlex.join(linker.command)} "$@"\n')
        lld.chmod(0o755)


def _cache_dir() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "flycomm"
    with suppress(OSError):
        base.mkdir(parents=True, exist_ok=True)
    return base if os.access(base, os.W_OK) else _process_dir()


@cache
def _process_dir() -> Path:
    """For a home that cannot be written: a folder that goes with the process."""
    folder = tempfile.mkdtemp(prefix="flycomm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
