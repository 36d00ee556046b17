# SPDX-License-Identifier: Apache-2.0
"""What NVIDIA GPUs do differently, under the primitives' own names."""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx

from flycomm.primitives.access import pointer


def wait_own_stores() -> None:
    """Nothing: a block barrier and a release at system scope are cumulative over the whole block's stores (PTX)."""


def acquire(address: Any) -> None:
    """Read the word again, with acquire: a fence would also wait until this thread's own flag stores are through."""
    fx.generic_load(pointer(address, fx.Uint64, 8), dtype=fx.Uint64, memory_order=fx.AtomicOrdering.Acquire)
