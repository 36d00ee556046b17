# SPDX-License-Identifier: Apache-2.0
"""Finding a linker for AMD code objects, and the folder that stands in for a ROCm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from flycomm import _shim, targets
from flycomm.errors import TargetError
from flycomm.targets import _hip_runtime
from flycomm.targets import _rocm_toolkit as toolkit


def _lld(path: Path, version: str) -> Path:
    """A program that answers ``--version`` like LLD and otherwise prints its arguments."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'#!/bin/sh\n[ "$*" = --version ] && echo "LLD {version} (compatible with GNU linkers)" || echo "$@"\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No ROCm, an empty PATH, no ziglang, no system LLVM, a cache of our own."""
    for name in toolkit._ROOT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolkit, "_DEFAULT_ROOT", str(tmp_path / "no-rocm"))
    monkeypatch.setattr(toolkit, "_SYSTEM_LLVM", str(tmp_path / "usr-lib"))
    monkeypatch.setattr(toolkit, "_ziglang", lambda: None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_without_a_linker_the_error_says_how_to_get_one():
    with pytest.raises(TargetError, match="no linker for AMD code objects was found: LLD >= 19") as caught:
        toolkit.root()
    assert "pip install ziglang" in str(caught.value)


def test_a_linker_that_is_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(_lld(tmp_path / "bin" / "ld.lld", "18.1.8").parent))
    with pytest.raises(TargetError, match=r"bin/ld\.lld is LLD 18\.1\.8\): LLD >= 19"):
        toolkit.find_linker()


def test_the_newest_numbered_linker_wins_over_an_old_plain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "bin"
    for name, version in (("ld.lld", "14.0.6"), ("ld.lld-19", "19.1.7"), ("ld.lld-22", "22.1.0"), ("ld.lld-9", "9.0")):
        _lld(folder / name, version)
    monkeypatch.setenv("PATH", str(folder))
    assert toolkit.find_linker() == toolkit.Linker((str(folder / "ld.lld-22"),), "22.1.0")


def test_the_systems_llvm_is_found_off_the_path(tmp_path: Path):
    lld = _lld(tmp_path / "usr-lib" / "llvm-20" / "bin" / "ld.lld", "20.1.0")
    assert toolkit.find_linker().command == (str(lld),)


def test_a_rocm_that_can_link_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _lld(tmp_path / "rocm" / "llvm" / "bin" / "ld.lld", "20.0.0git")
    (tmp_path / "rocm" / "amdgcn" / "bitcode").mkdir(parents=True)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    assert toolkit.root() == tmp_path / "rocm"


def test_a_rocm_with_an_old_linker_lends_its_bitcode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _lld(tmp_path / "rocm" / "llvm" / "bin" / "ld.lld", "17.0.0")
    bitcode = tmp_path / "rocm" / "amdgcn" / "bitcode"
    bitcode.mkdir(parents=True)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    lld = _lld(tmp_path / "bin" / "ld.lld", "21.0")
    monkeypatch.setenv("PATH", str(lld.parent))
    root = toolkit.root()
    assert (root / "llvm" / "bin" / "ld.lld").resolve() == lld
    assert (root / "amdgcn" / "bitcode").resolve() == bitcode


def test_the_stand_in_is_made_once_and_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lld = _lld(tmp_path / "bin" / "ld.lld", "19.1")
    monkeypatch.setenv("PATH", str(lld.parent))
    root = toolkit.root()
    assert root.parent == tmp_path / "cache" / "flycomm"
    assert (root / "llvm" / "bin" / "ld.lld").resolve() == lld
    assert list((root / "amdgcn" / "bitcode").iterdir()) == []
    assert toolkit.root() == root
    assert list(root.parent.iterdir()) == [root]  # nothing half made is left
    monkeypatch.setenv("ROCM_PATH", str(root))
    assert toolkit.root() == root  # compiling_for inside compiling_for


def test_ziglang_is_run_through_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    zig = tmp_path / "site packages" / "zig"
    zig.parent.mkdir()
    zig.write_text('#!/bin/sh\n[ "$*" = "ld.lld --version" ] && echo "LLD 22.1.8" || echo "$@"\n')
    zig.chmod(0o755)
    monkeypatch.setattr(toolkit, "_ziglang", lambda: zig)
    assert toolkit.find_linker() == toolkit.Linker((str(zig), "ld.lld"), "22.1.8")
    script = toolkit.root() / "llvm" / "bin" / "ld.lld"
    run = subprocess.run([script, "-shared", "a b.o"], capture_output=True, text=True, timeout=20, check=True)
    assert run.stdout == "ld.lld -shared a b.o\n"


def test_a_home_that_cannot_be_written_gets_a_folder_for_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made in a file
    monkeypatch.setenv("PATH", str(_lld(tmp_path / "bin" / "ld.lld", "19.1").parent))
    root = toolkit.root()
    assert (root / "llvm" / "bin" / "ld.lld").exists()
    assert tmp_path not in root.parents


def test_compiling_for_leaves_the_environment_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(_lld(tmp_path / "bin" / "ld.lld", "19.1").parent))
    monkeypatch.setenv("ARCH", "gfx1201")
    monkeypatch.delenv("COMPILE_ONLY", raising=False)
    before = dict(os.environ)

    def block(arch: str) -> Any:
        with targets.compiling_for("rocm", arch):
            inside = dict(os.environ)
            raise RuntimeError(inside)

    with pytest.raises(RuntimeError) as caught:
        block("gfx950")
    inside = caught.value.args[0]
    assert inside["ROCM_PATH"] == str(toolkit.root())
    assert (inside["ARCH"], inside["FLYDSL_GPU_ARCH"], inside["COMPILE_ONLY"]) == ("gfx950", "gfx950", "1")
    assert (inside["FLYDSL_COMPILE_BACKEND"], inside["FLYDSL_RUNTIME_KIND"]) == ("rocm", "rocm")
    assert dict(os.environ) == before


def test_compiling_for_without_a_linker_changes_nothing():
    before = dict(os.environ)
    with pytest.raises(TargetError, match="no linker"), targets.compiling_for("rocm", "gfx950"):
        pytest.fail("the block must not run")
    assert dict(os.environ) == before


class _Driver:
    """The shim's answers about HIP."""

    def __init__(self, devices: int = 0, error: str = ""):
        self._devices = devices
        self._error = error

    def open_driver(self, target: int) -> None:
        assert target == _shim.HIP
        if self._error:
            raise TargetError(self._error)

    def device_count(self, target: int) -> int:
        return self._devices


@pytest.mark.parametrize(
    ("hip", "driver", "linker", "ok", "reason"),
    [
        (None, _Driver(2), True, False, "is not a ROCm build"),
        ("7.2", _Driver(error="libamdhip64.so is not here"), True, False, "libamdhip64.so is not here"),
        ("7.2", _Driver(0), True, False, "HIP finds no device"),
        ("7.2", _Driver(8), False, False, "no linker for AMD code objects"),
        ("7.2", _Driver(8), True, True, "HIP finds 8 devices"),
    ],
)
def test_rocm_is_available_with_torch_driver_device_and_linker(
    hip: str | None,
    driver: _Driver,
    linker: bool,
    ok: bool,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    if linker:
        monkeypatch.setenv("PATH", str(_lld(tmp_path / "bin" / "ld.lld", "19.1").parent))
    monkeypatch.setattr(torch.version, "hip", hip)
    for name in ("open_driver", "device_count"):
        monkeypatch.setattr(_shim, name, getattr(driver, name))
    monkeypatch.setattr(_hip_runtime, "library", lambda: None)
    found = targets.get("rocm").availability()
    assert found.ok == ok
    assert reason in found.reason
