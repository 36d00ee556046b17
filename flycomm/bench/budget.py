# SPDX-License-Identifier: Apache-2.0
"""How much memory a benchmark's communicator gets: what is measured must not be a table's row cut short."""

from __future__ import annotations

from collections.abc import Sequence

from flycomm import tables
from flycomm.bench.collective import Collective
from flycomm.communicator import agreed_table
from flycomm.dispatch import select
from flycomm.errors import UsageError
from flycomm.kernels._topk_exchange_plan import lane_channels
from flycomm.layout import plan_layout
from flycomm.start import DEFAULT_MAX_BYTES
from flycomm.targets import Target
from flycomm.validate import check_size
from flycomm.world import World

_SMALLEST_BUDGET = 1 << 20
_NO_LIMIT = 1 << 40


def budget(
    target: Target,
    world: World,
    what: Collective,
    captured: bool,
    sizes: Sequence[int],
    topk: tuple[int, int] = (0, 0),
    asked: str | None = None,
) -> int:
    """Collective: the ``max_bytes`` with which shares of ``sizes`` bytes get the channels that the table means.

    ``topk``: rows and k of an exchange, whose channels have to fit too. ``asked``: as :func:`flycomm.tables.place`."""
    check_size(world)
    capabilities = target.capabilities(world.device)
    table = agreed_table(world, capabilities.arch, asked)
    lanes = lane_channels(target.runtime.torch_device_type == "cpu", *topk) if topk[1] else {}
    fusing = what.name in ("mono_ffn", "moe_finalize_norm")  # the layer beside separate kernels
    name = tables.FUSED[0] if fusing else what.name
    fused = name in tables.FUSED
    op, reduction = ("all_reduce", "sum") if fused else (name, what.reduction or "")

    def chosen(num_bytes: int) -> list[tables.Row | None] | None:
        try:
            plan = plan_layout(table, world.size, num_bytes, 1, capabilities.graphs, lane_channels=lanes)
        except UsageError:
            return None
        rows = [select(op, reduction, captured, size, "float32", _NO_LIMIT, plan.routes).row for size in sizes]
        return [*rows, *(plan.routes[name, captured] if fused else ())]

    num_bytes = DEFAULT_MAX_BYTES if capabilities.graphs else _SMALLEST_BUDGET
    while chosen(num_bytes) != chosen(_NO_LIMIT):
        num_bytes *= 2
    return max([num_bytes, *sizes])
