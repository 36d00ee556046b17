# SPDX-License-Identifier: Apache-2.0
"""How much memory a benchmark's communicator gets: what is measured must not be a table's row cut short."""

from __future__ import annotations

from collections.abc import Sequence

from flycomm import tables
from flycomm.bench.collective import Collective
from flycomm.communicator import agreed_table
from flycomm.dispatch import select
from flycomm.errors import UsageError
from flycomm.layout import plan_layout
from flycomm.start import DEFAULT_MAX_BYTES
from flycomm.targets import Target
from flycomm.world import World

_SMALLEST_BUDGET = 1 << 20
_NO_LIMIT = 1 << 40


def budget(target: Target, world: World, what: Collective, captured: bool, sizes: Sequence[int]) -> int:
    """Collective: the ``max_bytes`` with which shares of ``sizes`` bytes get the channels that the table means."""
    capabilities = target.capabilities(world.device)
    table = agreed_table(world, capabilities.arch, None)

    def chosen(num_bytes: int) -> list[tables.Row | None] | None:
        try:
            routes = plan_layout(table, world.size, num_bytes, 1, capabilities.graphs).routes
        except UsageError:
            return None
        reduction = what.reduction or ""
        return [select(what.name, reduction, captured, size, "float32", _NO_LIMIT, routes).row for size in sizes]

    num_bytes = DEFAULT_MAX_BYTES if capabilities.graphs else _SMALLEST_BUDGET
    while chosen(num_bytes) != chosen(_NO_LIMIT):
        num_bytes *= 2
    return max(num_bytes, *sizes)
