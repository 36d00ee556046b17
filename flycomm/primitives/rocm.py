# SPDX-License-Identifier: Apache-2.0
"""What AMD GPUs do differently, under the primitives' own names."""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from flydsl._mlir.dialects import rocdl
from flydsl.compiler import get_backend

from flycomm.primitives._matrix_rocm import multiply as multiply
from flycomm.primitives.access import load_relaxed, store_relaxed


def wait_own_stores() -> None:
    """``vmcnt`` counts a wave's own accesses: zero means that its stores have reached the (uncached) peer memory.

    gfx12 counts loads and stores apart.
    """
    if get_backend().target.arch.startswith("gfx12"):
        rocdl.s_wait_loadcnt(0)
        rocdl.s_wait_storecnt(0)
    else:
        fx.rocdl.s_waitcnt(vmcnt=0)


def land_own_stores() -> None:
    """A store that ``vmcnt`` no longer counts is in memory: segments are not cached, nothing has to be written back."""
    wait_own_stores()


def store_flag(address: Any, value: Any) -> None:
    """Peer-mapped memory is uncached and every wave has waited: a release would only add a cache write-back."""
    store_relaxed(address, value)


def push_fragment(address: Any, fragment: Any) -> None:
    """Two halves at system scope (``sc0 sc1``), with no wait between them: written through every cache."""
    halves = fragment.bitcast(fx.Uint64)
    for half in range(2):
        store_relaxed(address + fx.Int64(8 * half), halves[half])


def pull_fragment(address: Any, dtype: Any) -> Any:
    """Two halves at system scope: never a scalar load, never a line that a cache still holds."""
    halves = [load_relaxed(address + fx.Int64(8 * half)) for half in range(2)]
    return fx.Vector.from_elements(halves, fx.Uint64).bitcast(dtype)


def pause() -> None:
    """``s_sleep`` counts in 64 clocks of the compute unit: 1024, at 2.1 GHz half a microsecond."""
    rocdl.s_sleep(16)
