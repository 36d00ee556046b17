# SPDX-License-Identifier: Apache-2.0
"""``python -m flycomm doctor --archive``: everything that a bug report needs, in one file, whatever is missing."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from flycomm import __main__ as commands
from flycomm import compile as ahead
from flycomm.doctor import archive
from flycomm.errors import TargetError

_TOOL = {"command": "rocm-smi --showtopo", "output": "GPU0 XGMI\n", "problem": "", "links": None}
_HOST = {"name": "host", "ok": True, "devices": [{"arch": "x86-64"}]}
_CPU = {"versions": {}, "targets": [_HOST], "topology": []}


def _rocm(*arches: str) -> dict[str, Any]:
    one = {"name": "rocm", "ok": True, "devices": [{"arch": arch} for arch in arches]}
    return _CPU | {"targets": [one, _HOST], "topology": [_TOOL]}


def _packed(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as packed:
        files = [member for member in packed if member.isfile()]
        names = [member.name.partition("/") for member in files]
        assert {folder for folder, _, _ in names} == {archive.FOLDER}
        return {name: packed.extractfile(member).read() for member, (_, _, name) in zip(files, names, strict=True)}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be compiled: ``(pattern, arches)``."""
    asked: list[Any] = []

    def compile_code_objects(kernels: Any, arches: Any, out: Path, done: Any, jobs: int) -> ahead.Report:
        asked.append((kernels, arches))
        out.mkdir()
        (out / ahead.MANIFEST).write_text("{}")
        (out / "barrier.gfx942.kernel").write_text("a pickle, which is not sent")
        return ahead.Report()

    monkeypatch.setattr(ahead, "shipped", lambda pattern: pattern)
    monkeypatch.setattr(ahead, "compile_code_objects", compile_code_objects)
    return asked


def test_the_command_packs_the_report_and_what_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    results = tmp_path / "results"
    results.mkdir()
    (results / "tests.xml").write_text("<testsuites/>")
    rows = tmp_path / "bench.jsonl"
    rows.write_text("{}\n")
    path = tmp_path / "new" / "report.tar.gz"
    words = [
        "doctor",
        "--archive",
        str(path),
        "--kernels",
        "none*",
        "--add",
        str(results),
        str(rows),
        str(tmp_path / "gone"),
    ]
    commands.main(words)
    shown = capsys.readouterr().out
    assert f"written: {path}" in shown
    assert "gone: there is no such file" in shown
    packed = _packed(path)
    assert json.loads(packed["doctor.json"])["versions"]["flycomm"]
    assert packed["results/tests.xml"] == b"<testsuites/>"
    assert packed["bench.jsonl"] == b"{}\n"
    assert b"gone" in packed["missing.txt"]


def test_json_is_all_that_is_printed_if_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    commands.main(["doctor", "--json", "--kernels", "none*", "--archive", str(tmp_path / "report.tgz")])
    printed = json.loads(capsys.readouterr().out)
    assert json.loads(_packed(tmp_path / "report.tgz")["doctor.json"])["targets"] == printed["targets"]


def test_code_is_of_the_gpus_there_are_and_of_as_many_ranks(tmp_path: Path, compiled: list[Any]):
    path = tmp_path / "report.tar.gz"
    assert archive.write(path, _rocm("gfx942", "gfx942", "gfx942", "gfx942"), [], None) == []
    assert compiled == [("*_w4_*", ["gfx942"])]
    packed = _packed(path)
    assert packed.keys() == {"doctor.json", "rocm-smi.txt", "kernels/manifest.json"}
    assert packed["rocm-smi.txt"].startswith(b"GPU0 XGMI")
    archive.write(path, _rocm("gfx950"), [], "barrier*")
    assert compiled[1:] == [("barrier*", ["gfx950"])]


def test_no_gpu_no_code(tmp_path: Path, compiled: list[Any]):
    archive.write(tmp_path / "report.tar.gz", _CPU, [], None)
    assert compiled == []
    assert _packed(tmp_path / "report.tar.gz").keys() == {"doctor.json"}


def test_what_is_broken_is_named_in_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_linker(*unused: Any) -> Any:
        raise TargetError("no linker for AMD code objects")

    monkeypatch.setattr(ahead, "compile_code_objects", no_linker)
    report = _rocm("gfx942") | {"topology": {"error": "OSError: none"}}
    (problem,) = archive.write(tmp_path / "report.tar.gz", report, [], None)
    assert problem == "kernels *_w2_* for gfx942: no linker for AMD code objects"
    assert problem in _packed(tmp_path / "report.tar.gz")["missing.txt"].decode()


def test_an_archive_has_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert commands.main(["doctor", "--archive", str(tmp_path / "report.zip")]) == 2
    assert "report.zip does not end in .tar.gz or .tgz; name one that does" in capsys.readouterr().err
