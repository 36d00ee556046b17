# SPDX-License-Identifier: Apache-2.0
"""Memory that processes share by a file descriptor, on target cuda, against a fake driver whose memory is memfds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flycomm import env
from tests.unit.fake_drivers import SONAMES, build, call

SHARING = env.CUDA_SHARING.name


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("driver") / SONAMES["cuda"]
    build("cuda", library)
    return library


def run(case: str, fake: Path, *arguments: str, **variables: str) -> None:
    variables = {SHARING: "fd", "LD_LIBRARY_PATH": str(fake.parent)} | variables
    call("fd_memory_calls.py", case, str(fake), *arguments, **variables)


@pytest.mark.parametrize("case", ["share", "cycles", "devices", "dead", "ended", "crowd"])
def test_by_file_descriptor(fake: Path, case: str):
    run(case, fake)


@pytest.mark.slow
def test_an_owner_that_is_stopped_hangs_nobody(fake: Path):
    run("stopped", fake)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_users_get_nothing(fake: Path):
    run("users", fake)


IPC_REFUSED = "cuIpcGetMemHandle=801"
NEITHER = f"{IPC_REFUSED},cuMemCreate=2"


@pytest.mark.parametrize(
    ("sharing", "fail", "kind", "said"),
    [
        ("auto", "", "2", ""),
        ("ipc", "", "2", ""),
        ("fd", "", "4", ""),
        ("auto", IPC_REFUSED, "4", ""),
        ("fd", IPC_REFUSED, "4", ""),
        ("ipc", IPC_REFUSED, "export", "set FLYCOMM_CUDA_SHARING=fd on all ranks"),
        ("auto", NEITHER, "export", "something else (ERROR_OTHER, code 801)"),  # enough for virtual ranks
        ("fd", NEITHER, "allocation", "to be shared by a file descriptor, failed: out of memory"),
        ("fd", "cuMemAddressReserve=2", "allocation", "failed: out of memory"),
        ("fd", "cuMemMap=2", "allocation", "failed: out of memory"),
        ("fd", "cuMemSetAccess=2", "allocation", "failed: out of memory"),
        ("fd", "cuMemsetD32_v2=2", "allocation", "failed: out of memory"),
        ("fd", "cuMemExportToShareableHandle=2", "export", "cannot be shared by a file descriptor: out of memory"),
    ],
)
def test_the_way_that_is_taken(fake: Path, sharing: str, fail: str, kind: str, said: str):
    run("way", fake, kind, *filter(None, [said]), **{SHARING: sharing, "FAKE_FAIL": fail})


@pytest.mark.parametrize(
    "function", ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
)
def test_a_mapping_that_fails_leaves_nothing(fake: Path, function: str):
    run("half", fake, function)
