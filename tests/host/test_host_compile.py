# SPDX-License-Identifier: Apache-2.0
"""Compiling for the host target: what it refuses, and what FlyDSL keeps of it."""

import subprocess
import sys

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
import torch
from flydsl._mlir.dialects import llvm

from flycomm import targets
from flycomm.errors import UnsupportedOnTarget
from tests.host.host_target import activate, at, pointer, store
from tests.launch import ROOT

pytestmark = pytest.mark.host_only


@pytest.fixture(autouse=True)
def host():
    return activate()


# ---- operations of one vendor


@flyc.kernel
def _waitcnt_kernel():
    fx.rocdl.s_waitcnt(vmcnt=0)


@flyc.jit
def _waitcnt():
    _waitcnt_kernel().launch(grid=(1,), block=(64,))


@flyc.kernel
def _assembly_kernel(output: fx.Int64):
    i32 = fx.Int32.ir_type
    store(output, fx.Int32(0), fx.Int32(llvm.inline_asm(i32, [], "mov.u32 $0, %laneid;", "=r", has_side_effects=True)))


@flyc.jit
def _assembly():
    _assembly_kernel(fx.Int64(0)).launch(grid=(1,), block=(64,))


@flyc.kernel
def _intrinsic_kernel(output: fx.Int64):
    store(output, fx.Int32(0), fx.Int32(llvm.call_intrinsic(fx.Int32.ir_type, "llvm.amdgcn.workitem.id.x", [], [], [])))


@flyc.jit
def _intrinsic():
    _intrinsic_kernel(fx.Int64(0)).launch(grid=(1,), block=(64,))


@pytest.mark.parametrize(
    ("launch", "operation"),
    [
        (_waitcnt, "rocdl.s.waitcnt"),
        (_assembly, "llvm.inline_asm"),
        (_intrinsic, r"llvm.call_intrinsic \(llvm.amdgcn.workitem.id.x\)"),
    ],
)
def test_what_it_cannot_lower_is_named_with_its_place(launch, operation):
    place = (
        rf"target host cannot lower operation {operation} in _{launch.func.__name__[1:]}_kernel_0 at {__file__}:\d+; "
    )
    with pytest.raises(UnsupportedOnTarget, match=place):
        launch()


def test_memory_copies_are_refused_in_the_weak_mode_only(monkeypatch):
    x, y = torch.arange(16), torch.zeros(16, dtype=torch.int64)
    with pytest.raises(UnsupportedOnTarget, match=r"llvm.intr.memcpy \(the weak mode sees single stores only\)"):
        _bulk(at(x), at(y))
    monkeypatch.setenv("FLYCOMM_HOST_WEAK", "0")
    _bulk(at(x), at(y))
    assert torch.equal(x, y)


@flyc.kernel
def _bulk_kernel(x: fx.Int64, y: fx.Int64):
    to, source = pointer(y, fx.Int64), pointer(x, fx.Int64)
    llvm.intr_memcpy(to.llvm_ptr, source.llvm_ptr, fx.Int64(128).ir_value(), False)


@flyc.jit
def _bulk(x: fx.Int64, y: fx.Int64):
    _bulk_kernel(x, y).launch(grid=(1,), block=(1,))


# ---- beside other targets, and across processes


@flyc.kernel
def _store_kernel(output: fx.Int64):
    store(output, fx.Int32(fx.thread_idx.x), fx.Int32(fx.gpu.num_warp_threads()))


@flyc.jit
def _store(output: fx.Int64):
    _store_kernel(output).launch(grid=(1,), block=(64,))


def test_compiling_for_amd_stays_possible():
    output = torch.zeros(64, dtype=torch.int32)
    _store(at(output))
    with targets.compiling_for("rocm", "gfx950"):
        _store(fx.Int64(0))
        assert "gfx950" in _store._last_compiled[1].ir
    _store(at(output))
    assert (output == 32).all()


def test_the_weak_mode_and_the_warp_size_are_compiled_apart(monkeypatch):
    output = torch.zeros(64, dtype=torch.int32)
    keys = set()
    for weak in ("0", "1"):
        for warp in (32, 64):
            monkeypatch.setenv("FLYCOMM_HOST_WEAK", weak)
            monkeypatch.setenv("FLYCOMM_HOST_WARP", str(warp))
            _store(at(output))
            assert (output == warp).all()
            keys.add(_store._last_compiled[0])
    assert len(keys) == 4


_SECOND = """
from flycomm import targets
targets.activate(targets.get("host"))
import torch
from flydsl.compiler import jit_function
from tests.host.test_host_compile import _store, at
def compile(*args, **kwargs):
    raise AssertionError("compiled again")
jit_function.MlirCompiler.compile = compile
output = torch.zeros(64, dtype=torch.int32)
_store(at(output))
assert (output == 32).all()
"""


def test_the_disk_cache_serves_the_next_process():
    output = torch.zeros(64, dtype=torch.int32)
    _store(at(output))
    subprocess.run([sys.executable, "-c", _SECOND], cwd=ROOT, check=True, timeout=100)
