# SPDX-License-Identifier: Apache-2.0
"""Collectives between real processes, under torchrun (the group's backend is the reference) and mpirun."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from flycomm import targets
from tests.launch import bare_ranks, mpirun, no_mpi, torchrun

PROGRAM = Path(__file__).with_name("collective_ranks.py")
mpi = [pytest.mark.mpi, pytest.mark.skipif(bool(no_mpi()), reason=no_mpi() or "MPI is there")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "case", "ranks"),
    [
        (torchrun, "against_group", 2),
        pytest.param(torchrun, "against_group", 4, marks=pytest.mark.full),
        (torchrun, "subgroups", 4),
        pytest.param(mpirun, "mpi", 2, marks=mpi),
        pytest.param(mpirun, "mpi", 4, marks=[*mpi, pytest.mark.full]),
    ],
)
def test_collectives_between_processes(launcher, case, ranks):
    target = targets.pick()
    if launcher is torchrun and target.name != "host" and ranks > target.runtime.device_count():
        pytest.skip(f"NCCL and RCCL refuse {ranks} ranks on {target.runtime.device_count()} GPUs")
    run = launcher(PROGRAM, ranks, case)
    assert run.returncode == 0, run.stdout + run.stderr
    assert _said(run.stdout) == [f"rank {rank}: ok" for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["killed", "exits"])
def test_a_process_that_is_gone_ends_the_others_and_leaves_no_memory(case):
    before = _names()
    run = bare_ranks(PROGRAM, 3, case)
    assert _said(run.stdout) == ["rank 0: ok", "rank 2: ok"], run.stdout + run.stderr
    assert _names() <= before


def _said(output: str) -> list[str]:
    """Not by lines: the ranks share one pipe, and torchrun's Python writes a line and its end apart."""
    return sorted(re.findall(r"rank \d: ok", output))


def _names() -> set[str]:
    """Shared memory of processes that have ended: other tests may be making buffers meanwhile."""
    found = {name for name in os.listdir("/dev/shm") if name.startswith("flycomm.")}
    return {name for name in found if not Path("/proc", name.split(".")[1]).exists()}
