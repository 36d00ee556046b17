# SPDX-License-Identifier: Apache-2.0
"""Looking at the operations of a module that is compiled for target cuda."""

from __future__ import annotations

from typing import NoReturn

from flydsl._mlir import ir

from flycomm.errors import UnsupportedOnTarget


def operations(root: ir.Operation) -> list[ir.Operation]:
    """Every operation inside ``root``: a list, since a walk's callback may not erase, nor raise an error of its own."""
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        found.append(op)
        return ir.WalkResult.ADVANCE

    root.walk(visit)
    return found


def unsupported(op: ir.Operation, why: str) -> NoReturn:
    """Raise for an operation that NVIDIA GPUs do not have, naming it, the reason and its place."""
    raise UnsupportedOnTarget(
        f"target cuda cannot lower operation {op.name} ({why}) at {op.location}; use a target-neutral operation, or an "
        "override for this target"
    )
