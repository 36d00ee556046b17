# SPDX-License-Identifier: Apache-2.0
"""The stand-in HIP runtime, built, and the environment of processes that find it instead of a real one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from flycomm import _shim
from flycomm.errors import TargetError
from flycomm.targets import _rocm_toolkit
from tests.launch import launch

HERE = Path(__file__).parent
SONAME = "libamdhip64.so.7"
SOURCES = ("standin_hip.c", "standin_module.c", "standin_stream.c")
PROGRAM = HERE / "rocm_ranks.py"
_COMPILER = shutil.which("cc")
_OF_FLYDSL = ("ARCH", "FLYDSL_GPU_ARCH", "HSA_OVERRIDE_GFX_VERSION", "COMPILE_ONLY")  # of the caller, not of the test


def missing() -> str:
    """Why the stand-in cannot be used here; empty if it can."""
    if _COMPILER is None:
        return "there is no C compiler (cc) to build the stand-in HIP runtime with"
    try:
        _rocm_toolkit.find_linker()
    except TargetError as error:
        return str(error)
    return ""


def build_library(folder: Path, name: str = SONAME, soname: str = SONAME) -> Path:
    """Build the stand-in as ``folder/name``."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden"]
    options += [f"-Wl,-soname,{soname}", f"-Wl,--version-script={HERE / 'standin.map'}", "-Wl,-z,defs"]
    sources = [str(HERE / source) for source in SOURCES]
    command = [str(_COMPILER), *options, "-o", str(folder / name), *sources, "-lpthread", "-ldl", "-lrt"]
    subprocess.run(command, check=True, timeout=60)
    return folder / name


def build_kernels(folder: Path, arch: str, worlds: Iterable[int]) -> None:
    """Host builds of the kernels of :mod:`host_builds`, for the code objects of a chip."""
    folder.mkdir(parents=True, exist_ok=True)
    variables = {"FLYCOMM_TARGET": "host", "FLYCOMM_HOST_WARP": "64", "FLYCOMM_HOST_WEAK": "1"}
    command = [sys.executable, "-m", "tests.rocm_host.host_builds", str(folder), arch, *map(str, worlds)]
    done = launch(command, timeout=300, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr


def environment(library: Path, kernels: Path, **variables: str) -> dict[str, str]:
    """Variables of a process that finds the stand-in in the folder ``library``, in the dynamic linker's own way."""
    found = {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(library), os.environ.get("LD_LIBRARY_PATH", "")])),
        "STANDIN_HIP_KERNELS": str(kernels),
        "STANDIN_HIP_HOST": str(_shim.path()),
        "FLYCOMM_TARGET": "",
        "FLYCOMM_TABLE": str(HERE / "table.json"),
    }
    return found | dict.fromkeys(_OF_FLYDSL, "") | variables


def one_process(case: str, *arguments: str, env: dict[str, str], timeout: float = 100.0) -> str:
    """Run a case of ``rocm_ranks.py`` that needs no group; what it wrote to stderr."""
    done = launch([sys.executable, str(PROGRAM), case, *arguments], timeout, env)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout + done.stderr
    return done.stderr


requires = pytest.mark.skipif(bool(missing()), reason=missing() or "there")
