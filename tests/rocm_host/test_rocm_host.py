# SPDX-License-Identifier: Apache-2.0
"""The whole host side of target rocm, without an AMD GPU: HIP is a stand-in that runs the kernels on the host."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import flydsl
import pytest
import torch

from tests.launch import ROOT, torchrun
from tests.rocm_host import standin

pytestmark = [
    standin.requires,
    pytest.mark.slow,
    pytest.mark.host_only,
    pytest.mark.skipif(torch.version.hip is not None, reason="a ROCm build of torch brings a HIP runtime of its own"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of processes that find the stand-in."""
    folder = tmp_path_factory.mktemp("hip")
    standin.build_library(folder)
    standin.build_kernels(folder / "kernels", "gfx942", (2, 4))
    yield standin.environment(folder, folder / "kernels")
    for name in _names():  # of ranks that were killed
        Path("/dev/shm", name).unlink(missing_ok=True)


def _ranks(ranks: int, case: str, env: dict[str, str]) -> str:
    done = torchrun(standin.PROGRAM, ranks, case, env=env)
    said = sorted(re.findall(r"rank \d: ok", done.stdout))
    assert done.returncode == 0, done.stdout + done.stderr
    assert said == [f"rank {rank}: ok" for rank in range(ranks)]
    return done.stderr


def _names() -> set[str]:
    """Device memory of processes that have ended."""
    return {path.name for path in Path("/dev/shm").glob("standin-hip.*") if not _lives(path.name.split(".")[1])}


def _lives(pid: str) -> bool:
    return Path("/proc", pid).exists()


# ------------------------------------------------------------------ everything that a user calls


@pytest.mark.parametrize("ranks", [2, 4])
def test_from_init_to_close(built: dict[str, str], tmp_path: Path, ranks: int):
    before = _names()
    _ranks(ranks, "collectives", built | {"STANDIN_HIP_REPORT": str(tmp_path)})
    reports = [path.read_text() for path in tmp_path.iterdir()]
    assert reports == ["allocated 0 opened 0 mapped 0\n"] * ranks
    assert _names() <= before


@pytest.mark.parametrize("devices", [("0", "1"), ("0", "0"), ("1", "0", "1", "0")], ids="".join)
def test_virtual_ranks(built: dict[str, str], devices: tuple[str, ...]):
    standin.one_process("virtual", *devices, env=built)


# ------------------------------------------------------------------ compiled ahead


def test_nothing_is_compiled_where_everything_was_compiled_ahead(built: dict[str, str]):
    ahead = {"FLYCOMM_AOT_DIR": built["STANDIN_HIP_KERNELS"], "FLYDSL_RUNTIME_ENABLE_CACHE": "0"}
    said = _ranks(2, "compiled_ahead", built | ahead)
    assert "is compiled here" not in said


@pytest.mark.parametrize(
    ("change", "warned", "raised"),
    [
        (lambda data: data, "", ""),
        (lambda data: b"0" + data[1:], "was made by another flycomm or FlyDSL; it is compiled here", ""),
        (lambda data: None, "has no barrier_w2_1x64.gfx942.kernel; it is compiled here", ""),
        (lambda data: data[:-9], "", "is damaged .*; make the folder again"),
    ],
    ids=["same", "other", "missing", "damaged"],
)
def test_a_folder_compiled_ahead(
    built: dict[str, str], tmp_path: Path, change: Callable[[bytes], bytes | None], warned: str, raised: str
):
    name = "barrier_w2_1x64.gfx942.kernel"
    data = change(Path(built["STANDIN_HIP_KERNELS"], name).read_bytes())
    if data is not None:
        (tmp_path / name).write_bytes(data)
    said = standin.one_process("ahead", raised, env=built | {"FLYCOMM_AOT_DIR": str(tmp_path)})
    assert warned in said
    assert said.count("is compiled here") == bool(warned)


def test_a_folder_that_is_not_there(built: dict[str, str]):
    env = built | {"FLYCOMM_AOT_DIR": "/nonexistent"}
    standin.one_process("ahead", "FLYCOMM_AOT_DIR=/nonexistent is not a folder; make it with", env=env)


# ------------------------------------------------------------------ failures


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("case", ["without_a_target", "at_the_start", "without_peers", "at_a_launch", "at_the_end"])
def test_a_failure_of_hip_is_one_error_on_every_rank(built: dict[str, str], ranks: int, case: str):
    before = _names()
    _ranks(ranks, case, built)
    assert _names() <= before


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"STANDIN_HIP_NO_PEER": "1"}, "device 0 has no peer access to device 1"),
        (
            {"STANDIN_HIP_FAIL": "hipDeviceEnablePeerAccess:1:217"},
            "peer access is not supported between these two devices (hipErrorPeerAccessUnsupported, code 217)",
        ),
    ],
)
def test_devices_without_peer_access(built: dict[str, str], variables: dict[str, str], said: str):
    standin.one_process("virtual_without_peers", said, env=built | variables)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, ["True: HIP finds 8 devices"]),
        ({"STANDIN_HIP_DEVICES": "1"}, ["True: HIP finds 1 device"]),
        ({"STANDIN_HIP_DEVICES": "0"}, ["False", "sees no device"]),
        (
            {"STANDIN_HIP_FAIL": "hipInit:0:101"},
            [
                "False: HIP's driver was found but does not start",
                "invalid device ordinal (hipErrorInvalidDevice, code 101)",
            ],
        ),
        ({"STANDIN_HIP_FAIL": "hipGetDeviceCount:0:3"}, ["False", "an error without words (unnamed, code 3)"]),
    ],
)
def test_availability_in_hips_own_words(built: dict[str, str], variables: dict[str, str], said: list[str]):
    standin.one_process("availability", *said, env=built | variables)


# ------------------------------------------------------------------ one HIP runtime, one chip


def test_a_runtime_of_another_file_name_is_the_one_that_is_used(built: dict[str, str], tmp_path: Path):
    """As torch brings it: what counts for the dynamic linker is the soname."""
    copy = standin.build_library(tmp_path, "libamdhip64-1a2b3c4d.so")
    found = standin.one_process("availability", "True", env=built | {"LD_PRELOAD": str(copy)})
    assert found == ""


def test_a_second_runtime_is_refused(built: dict[str, str], tmp_path: Path):
    """torch's copy is called otherwise, so that FlyDSL's library would bring another."""
    copy = standin.build_library(tmp_path, "libamdhip64.so", soname="libamdhip64.so")
    other = Path(built["LD_LIBRARY_PATH"].split(os.pathsep)[0]) / standin.SONAME
    said = ["False: this process has 2 HIP runtimes", str(copy), str(other), f"LD_PRELOAD={copy}"]
    standin.one_process("availability", *said, env=built | {"STANDIN_TORCH_HIP": str(copy)})


def test_kernels_are_compiled_for_the_chip_that_hip_names(built: dict[str, str]):
    standin.one_process("the_chip", "gfx950", env=built | {"STANDIN_HIP_ARCH": "gfx950"})


# ------------------------------------------------------------------ the stand-in itself


def test_the_stand_in_has_what_is_needed_and_no_more():
    """A symbol that a new FlyDSL or a change of the shim needs is missing here first."""
    mlir = Path(flydsl.__file__).with_name("_mlir") / "_mlir_libs" / "libfly_jit_runtime.so"
    needed = set(re.findall(r"(?:ROW|OWN)\(\"(hip\w+)\"", (ROOT / "csrc_shim" / "ipc_hip.c").read_text()))
    of_flydsl = set(re.findall(r" U (hip\w+)@hip_4\.2", _symbols(mlir)))
    assert len(needed) > 20
    assert len(of_flydsl) > 20
    sources = "".join((standin.HERE / source).read_text() for source in standin.SOURCES)
    offered = set(re.findall(r"^HIP .*?\b(hip\w+)\(", sources, re.MULTILINE))
    offered |= set(re.findall(r"^ABSENT\((hip\w+)\)", sources, re.MULTILINE))
    assert offered == needed | of_flydsl


def test_symbols_have_hips_version(built: dict[str, str]):
    library = Path(built["LD_LIBRARY_PATH"].split(os.pathsep)[0]) / standin.SONAME
    assert " T hipModuleLaunchKernel@@hip_4.2" in _symbols(library)


def _symbols(library: Path) -> str:
    return subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True, timeout=60).stdout


def test_arguments_that_are_not_the_code_objects_are_refused(built: dict[str, str], tmp_path: Path):
    """A host build that takes another argument size must not run: else a wrong layout would go unseen."""
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    for source in Path(built["STANDIN_HIP_KERNELS"]).glob("*.c"):
        wrong = source.read_text().replace("{4, 8,", "{8, 8,", 1)
        assert wrong != source.read_text()
        (kernels / source.name).write_text(wrong)
        objects = [str(kernels / source.name), str(source.with_suffix(".o")), built["STANDIN_HIP_HOST"]]
        target = str((kernels / source.name).with_suffix(".so"))
        command = ["cc", "-shared", "-fPIC", "-w", "-Wl,-z,notext", "-o", target, *objects]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    said = standin.one_process("wrong_arguments", env=built | {"STANDIN_HIP_KERNELS": str(kernels)})
    assert "the arguments of kernel barrier_0 are not those of its host build" in said
