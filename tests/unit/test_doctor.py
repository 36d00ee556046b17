# SPDX-License-Identifier: Apache-2.0
"""``python -m flycomm doctor``: the whole report, whatever is missing or broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flycomm import __main__ as commands
from flycomm import __version__, doctor, env, targets
from flycomm.doctor import sections, topology
from flycomm.errors import TargetError
from flycomm.targets.base import Availability, Capabilities

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = {"versions", "targets", "peer_access", "shared_memory", "memory_sharing", "amd_linker", "mpi"}
SECTIONS |= {"environment", "channels", "topology"}


class _Runtime:
    def device_count(self) -> int:
        return 2


class _Memory:
    def sharing(self, device: int) -> str:
        return "pigeons"


class _Target:
    """A target that is there (two devices), or for which something is missing."""

    runtime = _Runtime()
    memory = _Memory()

    def __init__(self, reason: str = ""):
        self._reason = reason

    def availability(self) -> Availability:
        return Availability(not self._reason, self._reason or "2 devices")

    def capabilities(self, device: int) -> Capabilities:
        return Capabilities(f"Device [{device}]", "gfx950", 64, 256, 288 << 30, 100_000_000, graphs=True)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say which targets the machine has: ``machine(rocm=…, cuda=…, host=…)``, each a target or an exception."""

    def arrange(**found: Any) -> None:
        def get(name: str) -> Any:
            if isinstance(found[name], Exception):
                raise found[name]
            return found[name]

        monkeypatch.setattr(targets, "get", get)
        monkeypatch.setattr(sections, "_peer_access", lambda found: [[True, False], [True, True]])

    return arrange


def test_json_has_every_section(capsys: pytest.CaptureFixture[str]):
    commands.main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert set(report) == SECTIONS
    assert report["versions"]["flycomm"] == __version__
    assert [one["name"] for one in report["targets"]] == list(targets.NAMES)
    assert all(one["reason"] for one in report["targets"])
    assert [one["name"] for one in report["environment"]] == [variable.name for variable in env.ALL]


def test_tables_show_devices_peers_and_channels(machine: Any, capsys: pytest.CaptureFixture[str]):
    machine(rocm=_Target(), cuda=_Target("no driver"), host=_Target())
    assert commands.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "Device [1]",
        "gfx950",
        "288 GiB",
        "100 MHz",
        "no driver",
        "Peer access",
        "pigeons",
        "FLYCOMM_TIMEOUT",
        "64 MiB",
    ):
        assert words in shown


def test_no_usable_target_is_the_exit_code(machine: Any, capsys: pytest.CaptureFixture[str]):
    machine(rocm=_Target("no HIP"), cuda=ImportError("no cuda.py"), host=TargetError("no library"))
    assert commands.main(["doctor"]) == 1
    shown = capsys.readouterr().out
    for words in ("no HIP", "ImportError: no cuda.py", "TargetError: no library"):
        assert words in shown


def test_what_is_broken_is_said_in_its_section(
    machine: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def broken(*unused: Any) -> Any:
        raise RuntimeError("driver and library do not match")

    machine(rocm=_Target("no HIP"), cuda=_Target("no driver"), host=_Target())
    names = ("_versions", "_peer_access", "_shared_memory", "_memory_sharing", "_amd_linker", "_mpi", "_channels")
    names += ("topology",)
    for name in names:
        monkeypatch.setattr(sections, name, broken)
    monkeypatch.setenv(env.TIMEOUT.name, "soon")
    assert commands.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("RuntimeError: driver and library do not match") == len(names)
    assert "FLYCOMM_TIMEOUT='soon' is not understood" in shown


def test_variables_in_force(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(env.TIMEOUT.name, "2.5")
    monkeypatch.delenv(env.DEBUG.name, raising=False)
    found = {one["name"]: (one["set"], one["value"]) for one in doctor.collect()["environment"]}
    assert found[env.TIMEOUT.name] == (True, 2.5)
    assert found[env.DEBUG.name] == (False, False)


def test_versions_say_what_torch_was_built_for_and_which_drivers_there_are():
    versions = doctor.collect()["versions"]
    assert versions["torch_built_for"].split()[0] in ("CPU", "CUDA", "ROCm")
    assert {"rocm", "amdgpu_driver", "nvidia_driver"} <= versions.keys()


# ---- topology

_ROCM_SMI = """
========================= Weight between two GPUs =========================
       GPU0         GPU1
GPU0   0            15
GPU1   15           0

======================== Link Type between two GPUs =======================
       GPU0         GPU1
GPU0   0            XGMI
GPU1   XGMI         0
"""
_AMD_SMI = """
ACCESS TABLE:
             0000:05:00.0 0000:26:00.0
0000:05:00.0 ENABLED      ENABLED
0000:26:00.0 ENABLED      ENABLED

LINK TYPE TABLE:
             0000:05:00.0 0000:26:00.0
0000:05:00.0 SELF         XGMI
0000:26:00.0 XGMI         SELF
"""
_NVIDIA_SMI = """\x1b[4mGPU0	GPU1	NIC0	CPU Affinity\x1b[0m
GPU0	 X 	NV18	SYS	0-31
GPU1	NV18	 X 	SYS	0-31
NIC0	SYS	SYS	 X
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install programs in place of those on the PATH: ``tools(name=shell script, …)``."""

    def install(**scripts: str) -> None:
        for name, script in scripts.items():
            path = tmp_path / name.replace("_", "-")
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return install


@pytest.mark.parametrize(
    ("name", "output", "names", "kinds"),
    [
        ("rocm_smi", _ROCM_SMI, ["GPU0", "GPU1"], [["0", "XGMI"], ["XGMI", "0"]]),
        ("amd_smi", _AMD_SMI, ["0000:05:00.0", "0000:26:00.0"], [["SELF", "XGMI"], ["XGMI", "SELF"]]),
        ("nvidia_smi", _NVIDIA_SMI, ["GPU0", "GPU1"], [["X", "NV18"], ["NV18", "X"]]),
    ],
    ids=["rocm-smi", "amd-smi", "nvidia-smi"],
)
def test_links_are_read_from_what_the_tools_say(
    name: str, output: str, names: Any, kinds: Any, tools: Any, capsys: pytest.CaptureFixture[str]
):
    tools(**{name: f"while read -r line; do echo \"$line\"; done <<'END'\n{output}END"})
    (found,) = topology.topology()
    assert found["links"] == {"names": names, "kinds": kinds}
    assert found["problem"] == ""
    commands.main(["doctor"])
    assert f"Links, by {found['command']}" in capsys.readouterr().out


def test_a_tool_that_fails_or_hangs_is_said(
    tools: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(topology, "_SECONDS", 0.2)
    tools(rocm_smi="echo no driver >&2; exit 3", nvidia_smi="while :; do :; done")
    failed, hung = topology.topology()
    assert failed["problem"] == "exit code 3: no driver"
    assert "timed out after 0.2 seconds" in hung["problem"]
    assert failed["links"] is hung["links"] is None
    commands.main(["doctor"])
    assert "exit code 3: no driver" in capsys.readouterr().out


def test_no_tool_is_no_topology(tools: Any):
    tools()
    assert topology.topology() == []


def test_works_without_rich_and_without_a_terminal():
    code = "import sys; sys.modules['rich'] = None; from flycomm.__main__ import main; sys.exit(main(['doctor']))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode in (0, 1), run.stderr
    assert run.stdout.startswith("Versions\n")


def test_usage(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        commands.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("doctor", "compile", "bench"))
    with pytest.raises(SystemExit) as ended:
        commands.main([])
    assert ended.value.code == 2
