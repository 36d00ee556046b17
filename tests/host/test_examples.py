# SPDX-License-Identifier: Apache-2.0
"""The examples as a user starts them: virtual ranks, and none of the variables that the other GPU tests set."""

from __future__ import annotations

import sys

import pytest

from tests.launch import ROOT, launch

UNSET = ("CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS")
PROGRAMS = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_example_runs_on_its_own(program: str):
    bare = [word for name in UNSET for word in ("-u", name)]
    done = launch(["env", *bare, sys.executable, str(ROOT / "examples" / program)], timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on" in done.stdout
