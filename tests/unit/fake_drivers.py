# SPDX-License-Identifier: Apache-2.0
"""GPU drivers that are not there: builds of ``fake_driver.c``, and processes that find them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SONAMES = {"cuda": "libcuda.so.1", "hip": "libamdhip64.so.7"}
COMPILER = shutil.which("cc")


def build(name: str, library: Path) -> None:
    """Build a fake driver of that name; its soname is the file's name. Skips the test where there is no compiler."""
    if COMPILER is None:
        pytest.skip("there is no C compiler (cc) to build the fake driver with")
    options = ["-shared", "-fPIC", f"-D{name.upper()}", f"-Wl,-soname,{library.name}"]
    subprocess.run([COMPILER, *options, str(HERE / "fake_driver.c"), "-o", str(library)], check=True)


def call(script: str, *arguments: str, timeout: float = 60.0, **variables: str) -> None:
    """Run a case of a script beside this file in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, str(HERE / script), *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert (run.returncode, run.stdout) == (0, "ok\n"), run.stderr
