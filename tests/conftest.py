# SPDX-License-Identifier: Apache-2.0
"""What every test run shares: the target, the weak mode, warps that run apart, and a compile cache of its own.

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
_GPUS = ("rocm", "cuda")  # targets, and the marks of tests that run on one of them
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
    os.environ.setdefault("FLYCOMM_HOST_ORDER", "rotate")
    os.environ.setdefault("FLYCOMM_TABLE", "shipped")  # never what somebody tuned on this machine
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import settings

        # the same cases everywhere, as in CI, and none that fails because the machine was busy
        settings.register_profile("flycomm", deadline=None, derandomize=True, database=None)
        settings.load_profile("flycomm")
    if target != "host":
        # Read when the GPU is first used. A kernel of torch's that is loaded at its first launch may have to wait for
        # a kernel that runs, and with virtual ranks that one may be waiting for this very launch.
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
    for item in items:
        if (usable := _mark_gpu_test(item)) and (reason := _no_gpu(config, usable)):
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("mpi") and importlib.util.find_spec("mpi4py") is None:
            item.add_marker(pytest.mark.skip(reason="mpi4py is not installed (extra mpi)"))
    elsewhere = [item for item in items if item.get_closest_marker("host_only")]
    if elsewhere and _target(config) != "host":
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if not item.get_closest_marker("host_only")]


def _mark_gpu_test(item: pytest.Item) -> list[str]:
    """Mark a test that needs a GPU with the targets that it runs on: those it names, else both. Empty for others."""
    usable = [name for name in _GPUS if item.get_closest_marker(name)]
    if not usable and Path(__file__).parent / "gpu" in item.path.parents:
        usable = list(_GPUS)
    for name in ("gpu", *usable) if usable else ():
        item.add_marker(name)
    return usable


def _target(config: pytest.Config) -> str:
    """The target of this run."""
    from flycomm import targets

    asked = config.getoption("--target")
    return targets.pick().name if asked == "auto" else asked


def _no_gpu(config: pytest.Config, usable: list[str]) -> str:
    """Why a test that runs on these targets cannot run in this run; empty if it can."""
    from flycomm import targets

    asked = config.getoption("--target")
    if asked == "host":
        return "needs a GPU target: run with --target auto"
    found = {name: targets.get(name).availability() for name in usable if asked in ("auto", name)}
    if any(one.ok for one in found.values()):
        return ""
    return "; ".join(f"{name}: {one.reason}" for name, one in found.items()) or f"does not run on {asked}"
