# SPDX-License-Identifier: Apache-2.0
"""Kernels that may be there before the one ahead of them has ended: on NVIDIA GPUs they wait first."""

from __future__ import annotations

import re

import pytest
from build import build_launcher, needs_linker

from flycomm import env, kernels, targets
from flycomm.compile import ARCHES, _lowered
from flycomm.geometry import EARLY_THREADS, Geometry
from flycomm.kernels import SHIPPED, Specialization, barrier, reduce_norm, topk_exchange, topk_radix
from flycomm.primitives import launch_order

WAIT, LET = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
SMALL = Geometry(2, 64)
VARIANT = reduce_norm.Variant(256, quantize="group")
EARLY = [
    kernels.all_reduce(2, "bf16", SMALL, "packets"),
    kernels.all_reduce(3, "f32", SMALL, "two_shot"),
    kernels.all_reduce_norm(2, "bf16", SMALL, "sentinel", VARIANT),
    kernels.all_reduce_symmetric(2, "bf16", SMALL, "sum", True),
    kernels.all_gather(2, SMALL, "flags"),
    kernels.reduce_scatter(2, "f16", SMALL, "sentinel"),
    kernels.rank_barrier(2),
    topk_exchange.specialization("owner", "scores", 512, 64, True, True, True, False, 2, "f32", 4, 64),
    topk_radix.specialization("all", "candidates", 0, 64, 64, True, True, True, False, 2, "f32", 4, 64),
]


def ptx(specialization: Specialization, chip: str = "sm_90") -> str:
    with targets.compiling_for("cuda", chip):
        launcher, placeholders = specialization.build(
            specialization.world, specialization.dtype, specialization.blocks, specialization.threads
        )
        (image,) = _lowered.lower(launcher, placeholders).binaries.values()
    return image.decode()


def faults(text: str) -> list[str]:
    """Each is there once, the wait first, and nothing ahead of them accesses memory of others or branches: else why."""
    lines = [line.strip() for line in text.splitlines()]
    at = {what: [i for i, line in enumerate(lines) if line == what] for what in (WAIT, LET)}
    found = [f"{len(where)} × {what}" for what, where in at.items() if len(where) != 1]
    if found:
        return found
    (wait,), (let,) = at[WAIT], at[LET]
    found = [] if wait < let else ["the next may start before this one has waited"]
    code = re.compile(r"\$L|(@!?%p\d+ )?(bra|call|(ld|st|atom|red|cp|fence|membar|bar|prefetch)\b(?!\.(param|shared)))")
    return found + [line for line in lines[lines.index("{") : max(wait, let)] if code.match(line)]


@pytest.mark.parametrize("specialization", EARLY, ids=lambda one: one.name)
def test_a_kernel_waits_before_it_touches_memory(specialization: Specialization):
    assert faults(ptx(specialization)) == []


@pytest.mark.full
@pytest.mark.parametrize("specialization", [one for one in SHIPPED if one.world == 3], ids=lambda one: one.name)
def test_shipped_kernels_do_it_or_leave_it(specialization: Specialization):
    text = ptx(specialization)
    if specialization.blocks * specialization.threads > EARLY_THREADS or "_signal" in specialization.kernel:
        assert "griddepcontrol" not in text
    else:
        assert faults(text) == []


def test_what_comes_too_late_is_found():
    text = ptx(kernels.rank_barrier(2))
    late = text.replace(WAIT, "").replace("\tret;", f"\t{WAIT}\n\tret;", 1)
    assert any(one.startswith("ld.global") for one in faults(late))
    assert "the next may start before this one has waited" in faults(late)
    assert faults(text.replace(LET, f"{LET}\n\t{LET}")) == [f"2 × {LET}"]


def _barrier(blocks: int, threads: int) -> Specialization:
    return Specialization("barrier", barrier.build, 2, "", blocks, threads)


def test_only_small_grids_do():
    assert faults(ptx(_barrier(EARLY_THREADS // 512, 512))) == []
    assert "griddepcontrol" not in ptx(_barrier(EARLY_THREADS // 512 + 1, 512))
    # a block of these takes a whole multiprocessor's registers
    large = topk_exchange.specialization("all", "candidates", 0, 64, True, True, True, False, 2, "f32", 33, 512)
    assert "griddepcontrol" not in ptx(large)


def test_without_it_the_code_is_as_if_there_were_no_such_thing(monkeypatch: pytest.MonkeyPatch):
    old = ptx(_barrier(1, 64), "sm_80")
    monkeypatch.setenv(env.PDL.name, "0")
    off = ptx(_barrier(1, 64))
    monkeypatch.delenv(env.PDL.name)
    monkeypatch.setattr(barrier, "in_turn", lambda blocks, threads: None)
    assert off == ptx(_barrier(1, 64))
    assert old == ptx(_barrier(1, 64), "sm_80")


@needs_linker
@pytest.mark.parametrize("arch", ARCHES)
def test_amd_code_has_nothing_of_it(arch: str, monkeypatch: pytest.MonkeyPatch):
    with_it = build_launcher(*barrier.build(2, "", 1, 64), arch).data
    monkeypatch.setattr(barrier, "in_turn", lambda blocks, threads: None)
    assert with_it == build_launcher(*barrier.build(2, "", 1, 64), arch).data


def test_the_portable_verbs_are_nothing():
    """Outside a kernel anything else would raise."""
    assert launch_order.wait_for_previous.portable() is None
    assert launch_order.let_next_start.portable() is None
