# SPDX-License-Identifier: Apache-2.0
"""What can be refused before anything is measured, on all ranks alike."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flycomm.bench.collective import Collective
from flycomm.bench.problem import BUFFERS
from flycomm.bench.units import format_bytes
from flycomm.errors import UsageError
from flycomm.targets import Capabilities
from flycomm.world import World


def check_place(world: World, path: Path) -> None:
    """Rank 0 writes; nobody measures for what cannot be kept. Collective."""
    problem = ""
    if world.rank == 0:
        folder = next(one for one in path.absolute().parents if one.exists())
        if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            problem = f"{path} cannot be written; name another file with --out"
    _refuse(world, problem)


def check_memory(world: World, found: Capabilities, sharing: int, ops: Sequence[str], largest: int) -> None:
    """Inputs, what is expected, results, and copies of them to compare, a buffer each, of ``sharing`` ranks: half of a
    device's memory is for these. Collective."""
    whats = [Collective.of(op, None) for op in ops]
    shares = max(what.input_numel(1, world.size) + 3 * what.output_numel(1, world.size) for what in whats)
    asked = f"--to {format_bytes(largest).replace(' ', '')}"
    _refuse(world, _too_much(found, shares * largest * BUFFERS * sharing, asked, "--to"))


def check_data(world: World, found: Capabilities, sharing: int, op: str, num_bytes: int) -> None:
    """The same of the weights or caches of one rank's largest case. Collective."""
    _refuse(world, _too_much(found, num_bytes * sharing, f"--ops {op}", "shape"))


def _too_much(found: Capabilities, needed: int, asked: str, what: str) -> str:
    if needed <= found.memory_bytes // 2:
        return ""
    return (
        f"{asked} needs {needed >> 20} MiB of a device for its data, over half of the {found.memory_bytes >> 20} MiB "
        f"that it has; give a smaller {what}"
    )


def agreed_capabilities(world: World, found: Capabilities) -> tuple[Capabilities, int]:
    """``found`` with the fewest compute units of any rank, and how many virtual ranks share a device at most: the same
    on all ranks, as what they measure must be. Collective."""
    told = [json.loads(one) for one in world.exchange(json.dumps([found.compute_units, world.device]).encode())]
    sharing = max(Counter(device for _, device in told).values()) if world.local else 1
    return replace(found, compute_units=min(units for units, _ in told)), sharing


def _refuse(world: World, problem: str) -> None:
    if reasons := world.vote(not problem, problem):
        raise UsageError("; ".join(reasons))
