# SPDX-License-Identifier: Apache-2.0
"""What AMD GPUs do differently, under the primitives' own names."""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx

from flycomm.primitives.access import store_relaxed


def wait_own_stores() -> None:
    """``vmcnt`` counts a wave's own stores: zero means that they have reached the (uncached) peer memory."""
    fx.rocdl.s_waitcnt(vmcnt=0)


def store_flag(address: Any, value: Any) -> None:
    """Peer-mapped memory is uncached and every wave has waited: a release would only add a cache write-back."""
    store_relaxed(address, value)
