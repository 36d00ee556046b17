# SPDX-License-Identifier: Apache-2.0
"""``applies``: whether context parallelism pays; a pure function of the agreed table, the same on all ranks."""

from __future__ import annotations

from flycomm.tables import Table


def applies(table: Table, kind: str, world: int, context: int, rows: int) -> bool:
    """Whether ``world`` ranks should share the scoring of ``rows`` query rows over up to ``context`` tokens.

    The first of the table's crossovers for this kind of indexer and number of ranks that is for so many rows says from
    which context on. Without one it does, wherever there is more than one rank.
    """
    if world == 1:
        return False
    for one in table.indexer:
        fits = one.kind == kind and one.worlds[0] <= world <= one.worlds[1] and (one.rows is None or rows <= one.rows)
        if fits:
            return one.context is not None and context >= one.context
    return True
