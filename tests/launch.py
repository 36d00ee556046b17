# SPDX-License-Identifier: Apache-2.0
"""Ranks as real processes, for tests: ``torchrun(...)`` and ``mpirun(...)``.

Both run a Python script, or a module by its dotted name, on every rank, wait for it with a limit, and leave no process
behind. The repository's root is importable in the ranks.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def torchrun(
    program: str | Path, ranks: int, *args: str, timeout: float = 100.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``program`` on ``ranks`` ranks of torch.distributed; see :func:`launch`."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    module = [] if _is_script(program) else ["-m"]
    return launch([*command, *module, str(program), *args], timeout, env)


def bare_ranks(
    program: str | Path, ranks: int, *args: str, timeout: float = 100.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """As :func:`torchrun`, but with no agent that ends the other ranks when one dies; fails only with the launcher."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    start = "subprocess.Popen([sys.executable, *sys.argv[2:]], env=os.environ | {'RANK': str(r), 'LOCAL_RANK': str(r)})"
    code = f"import os, subprocess, sys; [p.wait() for p in [{start} for r in range(int(sys.argv[1]))]]"
    return launch([sys.executable, "-c", code, str(ranks), str(program), *args], timeout, variables | dict(env or {}))


def mpirun(
    program: str | Path, ranks: int, *args: str, timeout: float = 100.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``program`` on ``ranks`` ranks of MPI; see :func:`launch`. Skips the test where there is no MPI."""
    if reason := no_mpi():
        pytest.skip(reason)
    command = [str(_mpirun()), "-n", str(ranks)]
    if _is_open_mpi():
        command += ["--oversubscribe", "--bind-to", "none"]
    python = [sys.executable] if _is_script(program) else [sys.executable, "-m"]
    variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    variables |= {"OMPI_MCA_mpi_yield_when_idle": "1"}  # there may be fewer cores than ranks
    return launch([*command, *python, str(program), *args], timeout, variables | dict(env or {}))


def no_mpi() -> str:
    """Why MPI cannot be used here; empty if it can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (extra mpi)"
    return "" if _mpirun() else "mpirun is not found (extra mpi brings one)"


def launch(
    command: Sequence[str], timeout: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command and return it with its output. After ``timeout`` seconds it is killed with all its descendants, and
    ``subprocess.TimeoutExpired`` has what it had printed."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    variables |= {"OMP_NUM_THREADS": "1"} | dict(env or {})
    process = subprocess.Popen(
        command,
        env=variables,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as expired:
        _kill(process.pid)
        expired.output, expired.stderr = process.communicate()
        raise
    except BaseException:
        _kill(process.pid)
        process.wait()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, error)


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _is_script(program: str | Path) -> bool:
    return isinstance(program, Path) or program.endswith(".py")


@cache
def _mpirun() -> Path | None:
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    return Path(found) if found else None


@cache
def _is_open_mpi() -> bool:
    return "Open MPI" in launch([str(_mpirun()), "--version"], timeout=60).stdout


def _kill(pid: int) -> None:
    """Kill a process with its descendants: launchers start ranks in sessions of their own."""
    doomed = [pid, *_descendants(pid)]
    for one in doomed:
        _signal(one, signal.SIGSTOP)  # so that none of them starts another meanwhile
    for one in {*doomed, *_descendants(pid)}:
        _signal(one, signal.SIGKILL)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    pending = [pid]
    while pending:
        pending += (born := children.get(pending.pop(), []))
        found += born
    return found
