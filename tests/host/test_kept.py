# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels are found again without a trace, and never for anything else than what they were compiled from."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import flydsl.compiler as flyc
import pytest
import torch

from flycomm import kernels, targets
from flycomm.bench import floor_kernels
from flycomm.kernels import Specialization, _kept, _specialization, bind, compiled
from tests.host.one_channel import BLOCKS, channel, ranks, specialization

ROOT = Path(__file__).resolve().parents[2]
SPEC = specialization("flags", 1, "f32")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """A cache folder of this test's own, on the target of this run."""
    targets.activate(targets.pick())
    monkeypatch.setenv("FLYDSL_RUNTIME_CACHE_DIR", str(tmp_path))
    return tmp_path / "flycomm"


@pytest.fixture
def anew(monkeypatch):
    """``anew()``: this process has compiled nothing yet; the list it gives gets what is compiled from now on."""

    def forget() -> list:
        monkeypatch.setattr(_specialization, "_handles", {})
        _specialization._build.cache_clear()
        traced = []
        monkeypatch.setattr(_specialization.flyc, "compile", lambda *args: traced.append(args) or compile_one(*args))
        return traced

    compile_one = flyc.compile
    return forget


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pkl"))


def _check(handle) -> None:
    """An all-reduce in a world of one is a copy."""

    def body(world):
        kind = targets.active().runtime.torch_device_type
        x = torch.randn(300, device=kind)
        out = torch.zeros_like(x)
        with channel(world, "flags") as peers:
            stream = targets.active().runtime.current_stream(world.device)
            handle(peers, 1, x.data_ptr(), out.data_ptr(), 300, stream)
            bind(handle, (peers, 1, out.data_ptr(), None, 300, stream), (3,))(out.data_ptr())
        assert torch.equal(out, x)

    ranks(1, body)


def test_the_second_process_does_not_trace(folder, anew):
    assert len(anew()) == 0
    traced = anew()
    _check(compiled(SPEC))
    assert len(traced) == 1
    assert len(_files(folder)) == 1
    traced = anew()
    handle = compiled(SPEC)
    assert traced == []
    assert isinstance(handle, flyc.CompiledFunction)
    _check(handle)
    assert compiled(SPEC) is handle


_SECOND = """
from flydsl.compiler.jit_function import JitFunction
from flycomm import kernels, targets
from tests.host.one_channel import specialization
def trace(*arguments, **options):
    raise SystemExit(3)
JitFunction._trace = trace
kernels.compiled(specialization("flags", 1, "f32"))
"""


@pytest.mark.parametrize(
    ("name", "value", "rc"), [("", "", 0), ("FLYCOMM_HOST_WARP", "64", 3), ("FLYCOMM_HOST_WEAK", "0", 3)]
)
@pytest.mark.host_only
def test_in_a_process_of_its_own(anew, name, value, rc):
    anew()
    compiled(SPEC)
    environment = os.environ | ({name: value} if name else {})
    done = subprocess.run([sys.executable, "-c", _SECOND], env=environment, cwd=ROOT, timeout=100, check=False)
    assert done.returncode == rc


@pytest.mark.parametrize(
    "other",
    [
        Specialization("one_flags", SPEC.build, 2, "f32", BLOCKS, SPEC.threads),
        Specialization("one_flags", SPEC.build, 1, "f16", BLOCKS, SPEC.threads),
        Specialization("one_flags", SPEC.build, 1, "f32", 1, SPEC.threads),
        Specialization("one_flags", SPEC.build, 1, "f32", BLOCKS, 128),
        Specialization("one_flags", SPEC.build, 1, "f32", BLOCKS, SPEC.threads, 512),
        Specialization("one_flags", specialization("packets", 1, "f32").build, 1, "f32", BLOCKS, SPEC.threads),
    ],
    ids=["world", "dtype", "blocks", "threads", "resident_threads", "protocol"],
)
def test_another_specialization_is_another(folder, anew, other):
    anew()
    compiled(SPEC)
    traced = anew()
    compiled(other)
    assert len(traced) == 1
    assert len(_files(folder)) == 2


def test_other_sources_are_others(folder, anew, monkeypatch):
    anew()
    compiled(SPEC)
    monkeypatch.setattr(_kept, "_sources", lambda: "edited")
    traced = anew()
    compiled(SPEC)
    assert len(traced) == 1
    assert len(_files(folder)) == 2


def test_every_source_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(_kept, "_PACKAGE", tmp_path)
    hashes = []
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b/c.py", "1"), ("b/c.py", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        hashes.append(_kept._sources.__wrapped__())
    (tmp_path / "b/c.py").rename(tmp_path / "b/d.py")
    hashes.append(_kept._sources.__wrapped__())
    assert len(set(hashes)) == 5


def test_kernels_of_others_are_not_kept(folder, anew):
    def mine(*fixed):
        return SPEC.build(*fixed)

    for build in (mine, functools.partial(SPEC.build)):
        assert _kept._text(Specialization("one_flags", build, 1, "f32", BLOCKS, 64)) is None
    anew()
    compiled(Specialization("one_flags", mine, 1, "f32", BLOCKS, 64))
    assert _files(folder) == []


def test_functions_are_told_apart_by_what_they_were_made_with():
    def made(value, default=None):
        def build(world, dtype=default):
            return value

        build.__module__ = "flycomm.kernels.made"
        return build

    described = [_kept._described(one) for one in (made(1), made("1"), made((1, 2)), made(made(1)), made(1, default=2))]
    assert len(set(described)) == 5
    assert _kept._described(made(1)) == _kept._described(made(1))
    with pytest.raises(_kept._NotOursError):
        _kept._described(made(object()))
    with pytest.raises(_kept._NotOursError):
        _kept._described(made(1, default=[]))


def test_all_that_flycomm_ships_is_its_own():
    ours = [*kernels.SHIPPED, floor_kernels.empty(1, 64), floor_kernels.ping_pong()]
    texts = [_kept._text(one) for one in ours]
    assert None not in texts
    assert len(set(texts)) == len({one.name for one in ours})


@pytest.mark.parametrize(("name", "value"), [("FLYDSL_RUNTIME_ENABLE_CACHE", "0"), ("FLYDSL_RUNTIME_CACHE_DIR", "")])
def test_off(folder, anew, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    for _ in range(2):
        traced = anew()
        compiled(SPEC)
        assert len(traced) == 1
    assert _files(folder) == []


@pytest.mark.parametrize("name", ["FLYDSL_DUMP_IR", "FLYDSL_DEBUG_DUMP_ASM", "FLYDSL_KTRACE_ENABLE"])
def test_not_where_compiling_does_more(monkeypatch, name):
    assert _kept._flydsl.cache("x") is not None
    monkeypatch.setenv(name, "1")
    assert _kept._flydsl.cache("x") is None


def test_a_file_that_cannot_be_read(folder, anew):
    anew()
    compiled(SPEC)
    _files(folder)[0].write_bytes(b"not what it was")
    for times in (1, 0):  # the first replaces it
        traced = anew()
        _check(compiled(SPEC))
        assert len(traced) == times


def test_a_folder_that_cannot_be_written(folder, anew):
    anew()
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file")
    _check(compiled(SPEC))
