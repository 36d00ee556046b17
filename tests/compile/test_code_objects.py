# SPDX-License-Identifier: Apache-2.0
"""The command that writes kernels as AMD code objects, and the manifest that says how to launch them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
from build import build_launcher, needs_linker
from flydsl._mlir.dialects import llvm

from flycomm import __main__ as commands
from flycomm import compile as ahead
from flycomm import targets
from flycomm.compile import ARCHES, PTX_ARCHES, _elf
from flycomm.errors import UsageError
from flycomm.kernels import SHIPPED, Specialization, _ahead, _flydsl, _kept
from flycomm.kernels._launch import null_pointer

pytestmark = needs_linker


def _specialization(kernel: str, world: int) -> Specialization:
    return next(one for one in SHIPPED if one.kernel == kernel and one.world == world)


def test_manifest(tmp_path: Path):
    chosen = [_specialization("barrier", 2), _specialization("all_reduce_flags", 3)]
    seen = []
    report = ahead.compile_code_objects(chosen, ARCHES, tmp_path / "new", lambda *done: seen.append(done))
    assert report.failures == []
    assert seen == [(one.name, arch) for arch in ARCHES for one in chosen]

    manifest = json.loads((tmp_path / "new" / "manifest.json").read_text())
    assert manifest == {"kernels": report.kernels}
    assert [(one["name"], one["arch"]) for one in manifest["kernels"]] == seen
    for entry in manifest["kernels"]:
        assert list(entry) == [
            "name", "kernel", "file", "arch", "args", "grid", "block", "vgprs", "sgprs", "lds", "scratch", "code_bytes",
            "flydsl", "loads",
        ]  # fmt: skip
        code = _elf.parse((tmp_path / "new" / entry["file"]).read_bytes())
        assert code.arch == entry["arch"]
        assert code.symbols[entry["kernel"]].num_bytes == entry["code_bytes"] > 0
        assert entry["scratch"] == 0
        assert 0 < entry["vgprs"] <= 256
        assert 0 < entry["sgprs"] <= 106
        assert {frozenset(one) for one in entry["args"]} == {
            frozenset({"name", "offset", "size", "type", "value_kind"})
        }
    assert len({entry["file"] for entry in manifest["kernels"]}) == len(manifest["kernels"])


def test_processes_write_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ahead, "_FOR_A_PROCESS", 1)
    chosen = [_specialization(kernel, 2) for kernel in ("put_signal", "wait_signal", "barrier")]
    seen = []
    alone = ahead.compile_code_objects(chosen, ARCHES, tmp_path / "alone")
    spread = ahead.compile_code_objects(chosen, ARCHES, tmp_path / "spread", lambda *done: seen.append(done), jobs=2)
    assert spread == alone
    assert seen == [(one.name, arch) for arch in ARCHES for one in chosen]
    files = {path.name: path.read_bytes() for path in (tmp_path / "alone").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "spread").iterdir()}
    assert {entry["file"] for entry in spread.kernels} < files.keys()


class Toy:
    """A specialization whose kernel stores a number, or holds an instruction that no assembler knows."""

    def __init__(self, name: str, broken: bool):
        self.name = name
        self._broken = broken

    def launcher(self) -> Any:
        broken = self._broken

        @flyc.kernel(known_block_size=[64, 1, 1])
        def toy(out: fx.Pointer, number: fx.Int32):
            fx.generic_store(out, number + fx.Int32(1))
            if fx.const_expr(broken):
                llvm.inline_asm(None, [], "no_such_instruction", "", has_side_effects=True)

        @flyc.jit
        def launch(out: fx.Pointer, count: fx.Int32, blocks: fx.Int32, stream: fx.Stream):
            toy(out, count + fx.Int32(1)).launch(grid=(blocks, 2, 1), block=(64,), stream=stream)

        return launch

    def placeholders(self) -> tuple[Any, ...]:
        return null_pointer(fx.Int32, 4), 0, 0, fx.Stream(None)


def test_what_the_launcher_computes_has_no_name_and_no_number():
    toy = Toy("toy", broken=False)
    built = build_launcher(toy.launcher(), toy.placeholders(), "gfx950")
    assert [one["name"] for one in built.arguments] == ["out", None]
    assert built.launch.grid == (None, 2, 1)


def test_a_kernel_that_does_not_compile_is_reported_and_left_out(tmp_path: Path):
    report = ahead.compile_code_objects([Toy("bad/1", True), Toy("good/2", False)], ["gfx942"], tmp_path)
    assert [(one.name, one.arch) for one in report.failures] == [("bad/1", "gfx942")]
    assert report.failures[0].reason
    (entry,) = report.kernels
    assert (entry["name"], entry["file"]) == ("good/2", "good_2.gfx942.co")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good_2.gfx942.co", "manifest.json"]


@pytest.mark.parametrize("arches", [[], ["gfx942", "sm_70"], ["gfx950 "], ["gfx90a"]])
def test_unknown_arch_is_refused_before_anything_is_written(arches: list[str], tmp_path: Path):
    with pytest.raises(UsageError, match="gfx942 or gfx950 or gfx1250 or sm_90"):
        ahead.compile_code_objects([Toy("toy", False)], arches, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_ptx(tmp_path: Path):
    report = ahead.compile_code_objects(ahead.shipped("barrier_w2_*"), PTX_ARCHES, tmp_path)
    (entry,) = report.kernels
    assert (entry["file"], entry["loads"]) == ("barrier_w2_1x64.sm_90.ptx", "barrier_w2_1x64.sm_90.kernel")
    assert f".visible .entry {entry['kernel']}(" in (tmp_path / entry["file"]).read_text()


@pytest.mark.parametrize(("target", "arch"), [("rocm", "gfx950"), ("cuda", "sm_90")])
def test_what_was_compiled_ahead_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, arch: str):
    """Without a trace; tests/rocm_host runs it."""
    (chosen,) = ahead.shipped("barrier_w2_*")
    ahead.compile_code_objects([chosen], [arch], tmp_path)
    monkeypatch.setenv("FLYCOMM_AOT_DIR", str(tmp_path))
    with targets.compiling_for(target, arch):
        artifact = _flydsl.artifact_of(_ahead.load(chosen))
        assert artifact.ir == chosen.launcher()._last_compiled[1].ir
        assert f'chip = "{arch}"' in artifact.ir
        monkeypatch.setattr(_kept, "_sources", lambda: "other")
        assert _ahead.load(chosen) is None
    with targets.compiling_for("rocm", "gfx942"):
        assert _ahead.load(chosen) is None


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["compile", "--arch", "gfx942,gfx950", "--out", str(tmp_path), "--kernel", "barrier_w2_*"]
    assert commands.main(words) == 0
    plain = capsys.readouterr().out
    assert plain.count("barrier_w2_") == 2
    assert commands.main([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "manifest.json").read_text())
    assert [one["arch"] for one in printed["kernels"]] == ["gfx942", "gfx950"]


def test_command_fails_with_a_code_and_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert commands.main(["compile", "--arch", "gfx950", "--out", str(tmp_path), "--kernel", "nothing*"]) == 2
    assert "no kernel is named like 'nothing*'" in capsys.readouterr().err
    monkeypatch.setattr(ahead, "shipped", lambda pattern: [Toy("bad", True)])
    assert commands.main(["compile", "--arch", "gfx950", "--out", str(tmp_path)]) == 1
    assert "bad for gfx950 failed: " in capsys.readouterr().err
