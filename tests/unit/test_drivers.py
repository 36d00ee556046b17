# SPDX-License-Identifier: Apache-2.0
"""The table of driver functions, for CUDA and HIP, against a fake driver: what is called, and on which device."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

import pytest

from flycomm import _shim, env
from flycomm.errors import TargetError
from tests.unit import fake_drivers
from tests.unit.fake_drivers import COMPILER, ROOT, SONAMES, build

call = partial(fake_drivers.call, "driver_calls.py")


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a fake driver of each kind."""
    folder = tmp_path_factory.mktemp("drivers")
    for name, soname in SONAMES.items():
        build(name, folder / soname)
    return folder


@pytest.mark.parametrize("name", SONAMES)
@pytest.mark.parametrize("case", ["use", "buffers"])
def test_the_driver_is_found_by_soname(fakes: Path, name: str, case: str):
    call(case, name, str(fakes / SONAMES[name]), LD_LIBRARY_PATH=str(fakes))


@pytest.mark.parametrize("name", SONAMES)
def test_a_copy_in_the_process_is_used_whatever_its_name(fakes: Path, tmp_path: Path, name: str):
    """As torch brings one: a file name with a hash, a soname that nobody would try."""
    stem = SONAMES[name].split(".")[0]
    copy = tmp_path / f"{stem}{'' if name == 'cuda' else '-1a2b3c4d'}.so.99"
    build(name, copy)
    call("use", name, str(copy), LD_LIBRARY_PATH="/nonexistent", PRELOAD=str(copy))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        *[("cuda", f) for f in ("cuInit", "cuMemAlloc_v2", "cuMemsetD32_v2", "cuIpcGetMemHandle")],
        *[("cuda", f) for f in ("cuIpcOpenMemHandle_v2", "cuCtxEnablePeerAccess")],
        *[("hip", f) for f in ("hipInit", "hipExtMallocWithFlags", "hipMemsetD32", "hipIpcGetMemHandle")],
        *[("hip", f) for f in ("hipIpcOpenMemHandle", "hipDeviceEnablePeerAccess")],
    ],
)
def test_a_drivers_error_comes_in_its_own_words(fakes: Path, name: str, function: str):
    library = str(fakes / SONAMES[name])
    variables = {"FAKE_FAIL": f"{function}=2", env.CUDA_SHARING.name: "ipc"}
    call("fail", name, library, function, LD_LIBRARY_PATH=str(fakes), **variables)


@pytest.mark.parametrize("name", SONAMES)
def test_devices_without_peer_access_are_named(fakes: Path, name: str):
    call("no_peer", name, str(fakes / SONAMES[name]), LD_LIBRARY_PATH=str(fakes), FAKE_NO_PEER="1")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cuda", ["CUDA's driver library was not found: tried libcuda.so.1, libcuda.so", "NVIDIA's driver"]),
        ("hip", ["HIP's driver library was not found: tried libamdhip64.so.7, libamdhip64.so.6", "install ROCm"]),
    ],
)
def test_a_missing_driver_says_what_was_tried(name: str, said: list[str]):
    try:
        _shim.open_driver({"cuda": _shim.CUDA, "hip": _shim.HIP}[name])
    except TargetError as error:
        if "was not found" in str(error):
            call("missing", name, *said)
            return
    pytest.skip(f"this machine has the {name} driver")


def test_a_driver_that_is_too_old_says_what_it_lacks(tmp_path: Path):
    if COMPILER is None:
        pytest.skip("there is no C compiler (cc) to build the fake driver with")
    source = tmp_path / "old.c"
    source.write_text("int cuInit(unsigned flags) { return (int)flags; }\n")
    options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run([COMPILER, *options, str(source)], check=True)
    call("missing", "cuda", "has no cuDeviceGetCount, cuDeviceGetName", LD_LIBRARY_PATH=str(tmp_path))


def test_a_missing_library_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv(env.SHIM.name, str(tmp_path / "nothing.so"))
    _shim.lib.cache_clear()
    try:
        with pytest.raises(TargetError, match=r"nothing.so; build it with `make` or `pip install .`"):
            _shim.lib()
    finally:
        _shim.lib.cache_clear()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ('const char *fc_version(void) { return "0"; } const char *fc_last_error(void) { return ""; }', "interface 0"),
        (
            'const char *fc_version(void) { return "2"; } const char *fc_last_error(void) { return ""; }',
            "fc_driver_open",
        ),
        ("int other;", "fc_version"),
    ],
)
def test_a_library_of_another_version_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, said: str
):
    if COMPILER is None:
        pytest.skip("there is no C compiler (cc) to build a library with")
    (tmp_path / "other.c").write_text(source)
    library = tmp_path / "other.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "other.c")], check=True)
    monkeypatch.setenv(env.SHIM.name, str(library))
    _shim.lib.cache_clear()
    try:
        with pytest.raises(TargetError, match=f"{said}.*build it with `make`"):
            _shim.lib()
    finally:
        _shim.lib.cache_clear()


def test_python_and_the_header_name_the_same_version():
    header = (ROOT / "csrc_shim" / "flycomm_shim.h").read_text()
    assert f'#define FC_VERSION "{_shim._VERSION}"' in header
    assert f"FC_HANDLE_BYTES = {_shim.HANDLE_BYTES}" in header
