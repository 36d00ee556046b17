# SPDX-License-Identifier: Apache-2.0
"""Arguments that compile a launcher without running it."""

from __future__ import annotations

from typing import Any

import flydsl.compiler as flyc

from flycomm.primitives import peers_type


def null_pointer(element: Any, alignment: int) -> Any:
    """A pointer argument without an address: FlyDSL compiles with it and does not launch. Alignment in bytes."""
    return flyc.from_c_void_p(element, None, assumed_align=alignment)


def peers_placeholder(world: int, blocks: int) -> Any:
    """A ``Peers`` value whose addresses are all 0."""
    fields = dict.fromkeys(("rank", "limit", "capacity", "state", "record"), 0)
    fields |= {f"segment{j}": 0 for j in range(world)}
    return peers_type(world, blocks)(world=world, blocks=blocks, **fields)
