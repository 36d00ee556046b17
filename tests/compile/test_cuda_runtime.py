# SPDX-License-Identifier: Apache-2.0
"""FlyDSL calls on target cuda, end to end but for the driver: cuda_launches.py runs against a driver of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
COMPILER = shutil.which("cc")


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build of torch may not load with another driver")
def test_against_a_driver_that_writes_down(tmp_path: Path):
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        [str(COMPILER), "-shared", "-fPIC", "-o", str(library), str(HERE / "fake_libcuda.c")], check=True, timeout=60
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("ARCH", "COMPILE_ONLY")}
    environment |= {"LD_LIBRARY_PATH": str(tmp_path), "FLYDSL_RUNTIME_ENABLE_CACHE": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, str(HERE / "cuda_launches.py")],
        env=environment, cwd=HERE.parents[1], capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
