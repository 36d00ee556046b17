# SPDX-License-Identifier: Apache-2.0
"""What every test run shares: the target, the weak mode, and a compile cache of its own.

One process runs one target, so a run has one too: ``--target host`` by default, ``--target auto`` for whatever GPU
is there. Set before any test module, and with it flycomm, is imported.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import pytest

_CACHE = "FLYDSL_RUNTIME_CACHE_DIR"
_OF_THE_HOST = ("test_host_", "test_memory", "test_bench", "test_processes")  # files whose subject is the host target
_made_cache = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--target",
        choices=("host", "cuda", "rocm", "auto"),
        default="host",
        help="target that the tests run on; auto: the first of rocm, cuda and host that can run here",
    )


def pytest_configure(config: pytest.Config) -> None:
    target = config.getoption("--target")
    if target == "auto":
        os.environ.pop("FLYCOMM_TARGET", None)
    else:
        os.environ["FLYCOMM_TARGET"] = target
    os.environ.setdefault("FLYCOMM_HOST_WEAK", "1")
    if target != "host":  # a kernel of torch's that loads late may wait for a virtual rank's that spins
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    if _CACHE not in os.environ:  # xdist's workers find their controller's
        config.stash[_made_cache] = os.environ[_CACHE] = tempfile.mkdtemp(prefix="flycomm-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    made = config.stash.get(_made_cache, None)
    if made is not None:
        del os.environ[_CACHE]
        shutil.rmtree(made, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_tests = Path(__file__).parent / "gpu"
    for item in items:
        if gpu_tests in item.path.parents or "rocm" in item.keywords:
            item.add_marker("gpu")
        if "gpu" in item.keywords and (reason := _no_gpu(config, rocm="rocm" in item.keywords)):
            item.add_marker(pytest.mark.skip(reason=reason))
        if config.getoption("--target") != "host" and item.path.name.startswith(_OF_THE_HOST):
            item.add_marker(pytest.mark.skip(reason="its subject is the host target"))
        if "mpi" in item.keywords and importlib.util.find_spec("mpi4py") is None:
            item.add_marker(pytest.mark.skip(reason="mpi4py is not installed (extra mpi)"))


def _no_gpu(config: pytest.Config, rocm: bool) -> str:
    """Why a GPU test cannot run in this run; empty if it can."""
    from flycomm import targets

    asked = config.getoption("--target")
    if asked == "host":
        return "needs a GPU target: run with --target auto"
    usable = ("rocm",) if rocm else ("rocm", "cuda")
    found = {name: targets.get(name).availability() for name in usable if asked in ("auto", name)}
    if any(one.ok for one in found.values()):
        return ""
    return "; ".join(f"{name}: {one.reason}" for name, one in found.items()) or f"does not run on {asked}"
