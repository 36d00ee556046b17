# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer finds nothing in our kernels: no access out of bounds, no race in shared memory.

Two virtual ranks on one GPU. And it does find a kernel that stores out of bounds, and one that races: so it looks.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.sanitized_ranks import IN_TURN, IN_USE, TOGETHER
from tests.launch import launch

PROGRAM = Path(__file__).with_name("sanitized_ranks.py")
LIMIT_S = 240
SUMMARY = {"memcheck": "ERROR SUMMARY: ", "racecheck": "RACECHECK SUMMARY: "}

pytestmark = [pytest.mark.cuda, pytest.mark.full, pytest.mark.timeout(LIMIT_S + 30)]


def _findings(tool: str, case: str) -> tuple[int, str]:
    """How many errors or hazards the tool counts, and all that was printed; skips where the tool cannot run."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    command = [sanitizer, "--tool", tool, "--launch-timeout", "100"]  # importing torch takes its time
    command += ["--report-api-errors", "no"]  # torch and we ask the driver for things that it may refuse
    one_device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    # Lazily: otherwise every kernel of torch's is instrumented. The program launches none while a rank waits.
    env = {"CUDA_VISIBLE_DEVICES": one_device, "CUDA_MODULE_LOADING": "LAZY"}
    try:
        done = launch([*command, sys.executable, str(PROGRAM), case], LIMIT_S, env)
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"{tool} was not done after {LIMIT_S} s: {late.output[-3000:]}{late.stderr[-3000:]}")
    said = done.stdout + done.stderr
    if IN_USE not in said and (refusal := re.search(r"^=+ *((Internal Sanitizer )?Error.*)", said, re.MULTILINE)):
        pytest.skip(f"compute-sanitizer does not run here: {refusal[1]}")
    counted = re.search(rf"{SUMMARY[tool]}(\d+)", said)
    assert counted, said[-6000:]
    return int(counted[1]), said


@pytest.mark.parametrize("tool", SUMMARY)
def test_the_sanitizer_finds_nothing(tool):
    count, said = _findings(tool, "calls")
    assert count == 0, said[-6000:]
    if IN_TURN in said:
        pytest.skip(f"{tool} finds nothing, but here it lets kernels run in turn only: two ranks never met")
    assert TOGETHER in said, said[-6000:]


@pytest.mark.parametrize(("tool", "case"), [("memcheck", "out_of_bounds"), ("racecheck", "race")])
def test_the_sanitizer_finds_a_fault(tool, case):
    count, said = _findings(tool, case)
    assert count > 0, said[-6000:]
