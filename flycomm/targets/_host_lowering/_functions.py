# SPDX-License-Identifier: Apache-2.0
"""Kernels on their way out of a ``gpu.module``, and how to find operations in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flydsl._mlir import ir


def symbol(op: ir.Operation) -> str:
    return ir.StringAttr(op.attributes["sym_name"]).value


def function_name(module_name: str, name: str) -> str:
    """The name of a kernel once it is out of its ``gpu.module``."""
    return f"fc_{module_name}_{name}"


def operations(root: ir.Operation, wanted: Callable[[str], bool] = lambda name: True) -> list[ir.Operation]:
    """The operations under ``root`` with a wanted name, innermost first; safe to rewrite while going through them."""
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if wanted(op.name):
            found.append(op)
        return ir.WalkResult.ADVANCE

    root.walk(visit)
    return found


@dataclass(frozen=True)
class Kernel:
    """A kernel, out of its ``gpu.module``: ``void(fc_host_thread *self, void **params)``."""

    operation: ir.Operation
    thread: ir.Value  # its fc_host_thread
    shared_bytes: int  # of static shared memory
    accesses: list[ir.Operation]  # of memory, by the kernel's source (those that the rewriting adds are not among them)

    @property
    def entry(self) -> ir.Block:
        return self.operation.regions[0].blocks[0]
