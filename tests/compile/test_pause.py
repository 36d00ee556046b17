# SPDX-License-Identifier: Apache-2.0
"""The back-off of bounded waits in compiled code: only a wait that has already been long pauses."""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
import isa_rules as rules
import pytest
from build import Built, build, build_launcher, needs_linker

from flycomm import targets
from flycomm.compile import ARCHES, _lowered
from flycomm.kernels import SHIPPED, Specialization
from flycomm.primitives import poll, rocm

WAITS = ("barrier", "wait_signal", "all_reduce_packets", "all_reduce_sentinel")


def _shipped(kernel: str) -> Specialization:
    return next(one for one in SHIPPED if (one.kernel, one.world) == (kernel, 2))


def _faults(built: Built) -> list[str]:
    """Where a wave sleeps that should not, and what polls for long without ever sleeping."""
    function = built.function
    asleep = {one for one in function.instructions() if one.opcode == "s_sleep"}
    loops = {loop.header: loop for loop, _ in rules.polls(function, built.accesses)}.values()
    fast = [loop for loop in loops if not any(other.blocks < loop.blocks for other in loops)]
    slow = [loop for loop in loops if loop not in fast]
    found = [f"{one} in the loop of the first polls" for loop in fast for one in asleep & set(function.code_of(loop))]
    waiting = {one for loop in slow for one in function.code_of(loop)}
    found += [f"{one} outside a wait" for one in asleep - waiting]
    patient = [loop for loop in slow if asleep & set(function.code_of(loop))]
    around = [any(loop.blocks < other.blocks for other in patient) for loop in fast]
    return found + ["a wait that never sleeps"] * around.count(False) + ([] if fast else ["no wait"])


@needs_linker
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("kernel", WAITS)
def test_only_the_slow_loop_of_a_wait_sleeps(kernel: str, arch: str):
    assert _faults(build(_shipped(kernel), arch)) == []


def _rebuilt(kernel: str) -> Built:
    s = _shipped(kernel)
    return build_launcher(*s.build(s.world, s.dtype, s.blocks, s.threads), "gfx942")


@needs_linker
def test_a_sleep_between_the_first_polls_is_found(monkeypatch: pytest.MonkeyPatch):
    load = poll.load_relaxed

    def sleepy(address: Any, dtype: Any = fx.Uint64) -> Any:
        rocm.pause()
        return load(address, dtype)

    monkeypatch.setattr("flycomm.primitives.signal.load_relaxed", sleepy)
    assert any("of the first polls" in one for one in _faults(_rebuilt("barrier")))


@needs_linker
def test_a_wait_without_a_pause_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rocm, "pause", lambda: None)
    assert _faults(_rebuilt("barrier")) == ["a wait that never sleeps"]


@pytest.mark.parametrize("kernel", WAITS)
def test_nvidia_gpus_have_one_too(kernel: str):
    s = _shipped(kernel)
    with targets.compiling_for("cuda", "sm_90"):
        (image,) = _lowered.lower(s.launcher(), s.placeholders()).binaries.values()
    assert image.decode().count("nanosleep.u32") == 1
