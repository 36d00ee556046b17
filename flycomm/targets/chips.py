# SPDX-License-Identifier: Apache-2.0
"""AMD chips that kernels are made for, and what a compute unit of each holds.

From the tables of processors and of memory in LLVM's "User Guide for AMDGPU Backend", AMD's instruction set manuals
(CDNA 3, CDNA 4), and for gfx1250 LLVM's ``GCNSubtarget`` and FlyDSL's ``SMEM_CAPACITY_MAP``. A block may have 1024
threads on all of them, a grid 2³¹ - 1 blocks; how many may wait for each other is what ``flycomm.residency`` says.
"""

from __future__ import annotations

from dataclasses import dataclass

EXECUTION_UNITS = 4  # of a compute unit; FlyDSL's hint waves_per_eu counts waves on each


@dataclass(frozen=True)
class Chip:
    """``wave``: threads; ``vector_registers``: of an execution unit, each as wide as a wave; ``lds_bytes`` of a block
    at most, which is all that a compute unit has."""

    wave: int
    vector_registers: int
    lds_bytes: int


CHIPS = {
    "gfx942": Chip(wave=64, vector_registers=512, lds_bytes=64 << 10),
    "gfx950": Chip(wave=64, vector_registers=512, lds_bytes=160 << 10),
    "gfx1250": Chip(wave=32, vector_registers=1024, lds_bytes=320 << 10),
}
