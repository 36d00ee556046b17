# SPDX-License-Identifier: Apache-2.0
"""Run by test_cuda_runtime.py in a process of its own, with fake_libcuda.c for its driver: one target a process."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import cuda_kernels as kernels
import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest

from flycomm import env, targets
from flycomm.errors import TargetError
from flycomm.kernels import compiled, peers_placeholder, rank_barrier
from flycomm.targets import cuda

target = cuda.TARGET
driver = ctypes.CDLL("libcuda.so.1")
driver.fake_take.restype = ctypes.c_char_p
ADDRESS = fx.Int64(0x1234)


class Stream:
    cuda_stream = 0x77


def asked() -> list[str]:
    return driver.fake_take().decode().splitlines()


def current(device: int) -> None:
    context = ctypes.c_void_p()
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    driver.cuCtxPushCurrent_v2(context)


def on_threads(count: int, run: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def body() -> None:
        try:
            run()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=body) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def test_an_ordinary_call() -> None:
    kernels.add(ADDRESS, 3, 1.5, 7, 0x55)
    (retain, load, function, launch, more) = asked()
    assert (retain, load) == ("retain 0", "load on 0")
    name = function.split()[1]
    assert launch == f"launch {name} on 0: grid 7 2 1, block 64 1 1, shared 0, stream 0x55, first 0x1234"
    assert more == "more 3 1.5"
    kernels.add(ADDRESS, 4, 2.5, 8, stream=Stream())
    (launch, more) = asked()  # the module and the kernel are not looked for again
    assert "grid 8 2 1" in launch
    assert "stream 0x77" in launch
    assert more == "more 4 2.5"
    target.raise_pending()


def test_dynamic_shared_memory_is_asked_for_once() -> None:
    kernels.dynamic(ADDRESS)
    kernels.dynamic(ADDRESS)
    lines = asked()
    assert [line.split()[0] for line in lines] == ["load", "function", "allow", "launch", "launch"]
    assert "shared 65792" in lines[-1]


def test_every_device_has_its_own_module() -> None:
    compiled = flyc.compile(kernels.shared, ADDRESS)
    assert [line.split()[0] for line in asked()] == ["load", "function", "launch"]

    def other() -> None:
        target.preload(compiled, 1)
        lines = asked()
        assert lines
        assert not [line for line in lines if "on 0" in line or "launch" in line]
        current(1)
        compiled(ADDRESS, None)
        assert [line.split(":")[0].split()[-1] for line in asked() if line.startswith("launch")] == ["1"]
        target.raise_pending()

    on_threads(1, other)
    compiled(ADDRESS, None)
    assert [line.split()[0] for line in asked()] == ["launch"]


def test_many_threads_find_one_kernel() -> None:
    compiled = flyc.compile(kernels.coop, ADDRESS)
    asked()
    start = threading.Barrier(8)

    def launch() -> None:
        current(0)
        start.wait(30)
        for _ in range(25):
            compiled(ADDRESS, None)
        target.raise_pending()

    on_threads(8, launch)
    lines = [line for line in asked() if not line.startswith("retain")]
    assert len(lines) == 200
    assert {line.split()[0] for line in lines} == {"launch"}


def test_a_refused_launch_is_an_exception() -> None:
    kernels.add(ADDRESS, 3, 1.5, 0)
    with pytest.raises(TargetError, match=r"refused to launch add_kernel_0 \(grid 0 x 2 x 1, .*invalid argument"):
        target.raise_pending()
    target.raise_pending()  # once

    kernels.add(ADDRESS, 3, 1.5, 0)
    with pytest.raises(TargetError, match="refused to launch"):
        kernels.add(ADDRESS, 3, 1.5, 1)  # nobody asked: the next call of this thread says it
    kernels.add(ADDRESS, 3, 1.5, 0)
    on_threads(1, target.raise_pending)  # errors are a thread's own
    with pytest.raises(TargetError, match="refused to launch"):
        target.raise_pending()
    asked()


def test_an_image_that_does_not_load_says_why() -> None:
    @flyc.kernel(name="broken")
    def kernel(out: fx.Int64):
        kernels.store(out, fx.Int32(0), fx.Int32(1))

    @flyc.jit
    def launch(out: fx.Int64, stream: fx.Stream = kernels.DEFAULT_STREAM):
        kernel(out).launch(grid=(1,), block=(1,), stream=stream)

    compiled = flyc.compile(launch, ADDRESS)
    with pytest.raises(TargetError, match=r"INVALID_PTX.*line 7 is nonsense"):
        target.raise_pending()
    with pytest.raises(TargetError, match=r"INVALID_PTX.*line 7 is nonsense"):
        target.preload(compiled, 1)
    assert not [line for line in asked() if "launch" in line]


def test_loading_during_capture_says_what_to_do() -> None:
    ctypes.c_int.in_dll(driver, "fake_capturing").value = 1
    kernels.scopes(ADDRESS)
    ctypes.c_int.in_dll(driver, "fake_capturing").value = 0
    with pytest.raises(TargetError, match=r"STREAM_CAPTURE_UNSUPPORTED.*preload it, before a stream is captured"):
        target.raise_pending()
    kernels.scopes(ADDRESS)
    target.raise_pending()
    assert [line.split()[0] for line in asked()] == ["load", "function", "launch"]


def test_occupancy() -> None:
    compiled = flyc.compile(kernels.orders, ADDRESS)
    asked()
    assert target.resident_blocks(compiled) == 64
    assert asked() == ["occupancy of 32 threads, 0 bytes"]


def test_preload_of_no_device() -> None:
    with pytest.raises(TargetError, match="device 2 does not exist: CUDA sees 2"):
        target.preload(flyc.compile(kernels.orders, ADDRESS), 2)


def test_a_kernel_goes_with_its_launcher() -> None:
    @flyc.jit
    def launch(out: fx.Int64, stream: fx.Stream = kernels.DEFAULT_STREAM):
        kernels.speak_kernel(out).launch(grid=(1,), block=(1,), stream=stream)

    launch(ADDRESS)
    asked()
    launch._mem_cache.clear()
    launch._last_compiled = None
    assert asked() == ["unload on 0"]


def test_only_kernels_that_wait_by_themselves_start_early(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = compiled(rank_barrier(2))
    asked()

    def launched() -> str:
        barrier(peers_placeholder(2, 1), 0, ADDRESS, Stream())
        kernels.add(ADDRESS, 3, 1.5, 7)
        target.raise_pending()
        early, plain = (line for line in asked() if "launch " in line)
        assert plain.startswith("launch add_kernel"), "it does not wait"
        assert ": grid 1 1 1, block 64 1 1, shared 0, stream 0x77," in early
        return early.partition("_0 on 0")[0]

    launched()  # the first one loads the module
    assert launched() == "launch barrier", "nobody has allowed it"
    allowed = target.start_early(True)
    assert launched() == "early launch barrier"
    forbidden = target.start_early(False)
    again = target.start_early(True)
    assert launched() == "launch barrier", "one rank of several on this device"
    forbidden()
    allowed()
    assert launched() == "early launch barrier"
    again()
    assert launched() == "launch barrier"
    monkeypatch.setenv(env.PDL.name, "0")
    off = target.start_early(True)
    assert launched() == "launch barrier"
    off()
    monkeypatch.delenv(env.PDL.name)
    ctypes.c_int.in_dll(driver, "fake_version").value = 12020
    old = target.start_early(True)
    assert launched() == "launch barrier", "a driver that cannot capture such a launch"
    old()
    ctypes.c_int.in_dll(driver, "fake_version").value = 13000
    end = target.start_early(True)
    ctypes.c_int.in_dll(driver, "fake_refuses_early").value = 1
    assert launched() == "launch barrier", "refused: launched plainly"
    ctypes.c_int.in_dll(driver, "fake_refuses_early").value = 0
    assert launched() == "launch barrier", "and not tried again"
    end()


def test_capabilities() -> None:
    found = target.capabilities(1)
    assert (found.device_name, found.arch, found.warp_size, found.compute_units) == ("Fake 1", "sm_90", 32, 132)
    assert found.graphs


targets.activate(target)
