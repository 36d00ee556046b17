# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for an AMD chip, for the tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

import pytest
from isa import Access, Function, accesses, parse

from flycomm import targets
from flycomm.compile import ARCHES, _elf, _lowered, arguments
from flycomm.errors import TargetError
from flycomm.kernels import SHIPPED, Specialization
from flycomm.targets import _rocm_toolkit


@dataclass(frozen=True)
class Built:
    """One kernel as an object file and as text."""

    data: bytes
    code: _elf.CodeObject
    launch: _lowered.Launch
    metadata: dict[str, Any]  # the kernel's entry in the metadata note
    arguments: list[dict[str, Any]]  # as in the manifest
    function: Function
    accesses: list[Access]

    @property
    def single_wave(self) -> bool:
        return self.metadata[".max_flat_workgroup_size"] <= self.metadata[".wavefront_size"]


@lru_cache(maxsize=16)  # what follows each other shares it; hundreds of kernels would fill the memory
def build(specialization: Specialization, arch: str) -> Built:
    """Compile a specialization, whose launcher launches one kernel."""
    with targets.compiling_for("rocm", arch):  # what it is built for depends on the chip
        return build_launcher(specialization.launcher(), specialization.placeholders(), arch)


def build_launcher(launcher: Any, placeholders: tuple[Any, ...], arch: str) -> Built:
    with targets.compiling_for("rocm", arch):
        lowered = _lowered.lower(launcher, placeholders)
        text = _lowered.assembly(lowered)
    (launch,) = lowered.launches
    data = lowered.binaries[launch.binary]
    code = _elf.parse(data)
    (metadata,) = code.kernels
    named = arguments(metadata, launch)
    function = parse(text)[launch.kernel]
    return Built(data, code, launch, metadata, named, function, accesses(function, named))


def cases() -> list[Any]:
    """Every (specialization, arch). The quick set covers every pair of values of two parameters; the rest is `full`."""
    every = [(specialization, arch) for specialization in SHIPPED for arch in ARCHES]
    quick = set()
    missing = {pair for one in every for pair in _pairs(*one)}
    while missing:
        best = max(every, key=lambda one: len(missing & _pairs(*one)))
        quick.add(best)
        missing -= _pairs(*best)
    return [
        pytest.param(specialization, arch, id=f"{specialization.name}-{arch}", marks=() if one in quick else marks)
        for one in every
        for specialization, arch in (one,)
        for marks in (pytest.mark.full,)
    ]


def _pairs(specialization: Specialization, arch: str) -> frozenset[Any]:
    s = specialization
    values = enumerate((s.kernel, s.world, s.dtype, (s.blocks, s.threads), arch))
    return frozenset(combinations(values, 2))


def _why_not() -> str:
    try:
        _rocm_toolkit.find_linker()
    except TargetError as missing:
        return str(missing)
    return ""


needs_linker = pytest.mark.skipif(bool(_why_not()), reason=_why_not())
