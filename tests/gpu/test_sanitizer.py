# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer finds nothing in our kernels: no access out of bounds, no race in shared memory."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.launch import launch

PROGRAM = Path(__file__).with_name("sanitized_ranks.py")


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, str(PROGRAM)]
    run = launch(command, timeout=280, env={"CUDA_MODULE_LOADING": "LAZY"})
    if "not supported" in run.stdout:
        pytest.skip(f"compute-sanitizer does not run here: {run.stdout.splitlines()[-1]}")
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert "every protocol: ok" in run.stdout
    assert "ERROR SUMMARY: 0 errors" in run.stdout or "0 hazards" in run.stdout, run.stdout[-2000:]
