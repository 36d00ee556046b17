# SPDX-License-Identifier: Apache-2.0
"""Worlds and memory between real processes, under torchrun and mpirun."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flycomm import targets
from tests.launch import launch, mpirun, no_mpi, torchrun

PROGRAM = Path(__file__).with_name("world_ranks.py")
mpi = [pytest.mark.mpi, pytest.mark.skipif(bool(no_mpi()), reason=no_mpi() or "MPI is there")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "program", "case", "ranks"),
    [
        (torchrun, PROGRAM, "torch_groups", 2),
        pytest.param(torchrun, PROGRAM, "torch_groups", 4, marks=pytest.mark.full),
        (torchrun, "tests.host.world_ranks", "torch_auto", 2),
        (torchrun, PROGRAM, "torch_gone", 3),
        pytest.param(mpirun, PROGRAM, "mpi_worlds", 2, marks=mpi),
        pytest.param(mpirun, "tests.host.world_ranks", "mpi_worlds", 4, marks=[*mpi, pytest.mark.full]),
    ],
)
def test_worlds_between_processes(launcher: Callable, program: str | Path, case: str, ranks: int):
    target = targets.pick()
    if case == "torch_auto" and target.name != "host" and ranks > target.runtime.device_count():
        pytest.skip(f"NCCL and RCCL refuse {ranks} ranks on {target.runtime.device_count()} GPU")
    run = launcher(program, ranks, case)
    assert run.returncode == 0, run.stdout + run.stderr
    # Not by lines: the ranks share one pipe, and torchrun's Python writes a line and its end apart.
    assert sorted(re.findall(r"rank \d: ok", run.stdout)) == [f"rank {rank}: ok" for rank in range(ranks)]


def test_a_launch_that_outlasts_its_limit_leaves_no_process():
    """Launchers start ranks in sessions of their own, so it is not enough to kill the launcher's group."""
    launcher = """
import subprocess, sys
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(300)"]
ranks = [subprocess.Popen(sleep, start_new_session=True) for _ in range(2)]
print(*(rank.pid for rank in ranks), flush=True)
ranks[0].wait()
"""
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        launch([sys.executable, "-S", "-c", launcher], timeout=6)  # seconds: the launcher itself starts in far less
    pids = [int(pid) for pid in caught.value.output.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, pids))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
