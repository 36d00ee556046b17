# SPDX-License-Identifier: Apache-2.0
"""From two times a size to the size at which one way takes over from the other. No device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

Pair = tuple[float, float]  # µs of one way and of the other


def wins_first(pairs: Sequence[Pair]) -> int:
    """For how many of ``pairs``, from the first on, to take the first way and then the other.

    So that the sum of all ratios to the better time is least: one size at which noise swapped the two decides nothing.
    Of equal sums the one with the first way for longer.
    """
    ratios = [(one / min(one, other), other / min(one, other)) for one, other in pairs]
    changes = accumulate((ours - theirs for ours, theirs in ratios), initial=0.0)
    return min(enumerate(changes), key=lambda found: (round(found[1], 9), -found[0]))[0]


def rows_up_to(measured: Mapping[int, Pair], before: int | None) -> int:
    """Rows up to which a mono launch pays: ``measured``, rows → µs of it and of separate kernels.

    ``before``: what was believed (None: nothing), which stays of rows that were not measured.
    """
    rows = sorted(measured)
    count = wins_first([measured[one] for one in rows])
    if not count:
        return min(rows[0] - 1, rows[0] - 1 if before is None else before)
    return rows[count - 1] if count < len(rows) else max(rows[-1], before or 0)


def shared_from(measured: Mapping[int, Pair], before: int | None) -> int | None:
    """The context from which on ranks share an indexer's scoring, None for never: ``measured``, context → µs shared and
    alone. It is where lines through the two contexts between which that changes cross.

    ``before``: what was believed, which stays of contexts that were not measured; but that sharing pays for longer ones
    is no longer believed where it did not for the longest.
    """
    contexts = sorted(measured)
    count = wins_first([(alone, shared) for shared, alone in map(measured.__getitem__, contexts)])
    if not count:
        return contexts[0] if before is None else min(before, contexts[0])
    if count == len(contexts):
        return before if before is not None and before > contexts[-1] else None
    below, above = contexts[count - 1], contexts[count]
    lost, won = (alone - shared for shared, alone in (measured[below], measured[above]))
    if not lost < 0 < won:
        return above
    return math.ceil(below + (above - below) * lost / (lost - won))
