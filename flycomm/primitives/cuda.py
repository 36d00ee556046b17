# SPDX-License-Identifier: Apache-2.0
"""What NVIDIA GPUs do differently, under the primitives' own names."""

from __future__ import annotations


def wait_own_stores() -> None:
    """Nothing: a block barrier and a release at system scope are cumulative over the whole block's stores (PTX)."""
