# SPDX-License-Identifier: Apache-2.0
"""``import flycomm`` is cheap and touches no driver and no compiler."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 1.0  # on top of importing torch

_PROBE = """
import json, time
import torch

def mapped():
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if "/" in line}

before = mapped()
started = time.perf_counter()
import flycomm
seconds = time.perf_counter() - started
import sys
print(json.dumps({
    "seconds": seconds,
    "mapped": sorted(mapped() - before),
    "flydsl": sorted(name for name in sys.modules if name.split(".")[0] == "flydsl"),
    "cuda": torch.cuda.is_initialized(),
}))
"""


@pytest.fixture(scope="module")
def imports() -> list[dict]:
    """Three fresh processes that import torch, then flycomm."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    runs = []
    for _ in range(3):
        run = subprocess.run(
            [sys.executable, "-c", _PROBE], env=environment, capture_output=True, text=True, timeout=100
        )
        assert run.returncode == 0, run.stderr
        runs.append(json.loads(run.stdout))
    return runs


def test_import_is_cheap(imports: list[dict]):
    seconds = [run["seconds"] for run in imports]
    assert median(seconds) < LIMIT_S, f"import flycomm took {seconds} s after torch"


def test_import_opens_no_driver(imports: list[dict]):
    drivers = ("libcuda", "libamdhip64", "libhsa-runtime", "libnvidia", "libnccl", "librccl", "libflycomm_shim")
    for run in imports:
        assert [path for path in run["mapped"] if Path(path).name.startswith(drivers)] == []
        assert not run["cuda"]


def test_import_leaves_the_compiler_alone(imports: list[dict]):
    assert all(run["flydsl"] == [] for run in imports)


def test_flydsl_finds_the_backends_as_plugins():
    try:
        importlib.metadata.distribution("flycomm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("flycomm is imported from its source tree, not installed")
    entries = importlib.metadata.entry_points(group="flydsl.backends")
    found = {entry.name: entry.value for entry in entries if entry.dist is not None and entry.dist.name == "flycomm"}
    assert found == {
        "host": "flycomm.targets.host:HostBackend",
        "cuda": "flycomm.targets.cuda:CudaBackend",
    }
