# SPDX-License-Identifier: Apache-2.0
"""Which rank holds which position of a sequence: one arithmetic for host code, traced code and tests.

Positions are dealt out by granules: granule ``i`` of ``granule`` positions is rank ``i % world``'s, and a rank keeps
its granules one after the other, so the order of local positions is that of the global ones. A granule as long as a
rank's whole share deals out contiguously. Arguments are Python ints, or FlyDSL integers of one type (``world`` may stay
an int), and not negative.
"""

from typing import Any


def global_of(local: Any, rank: Any, world: Any, granule: Any) -> Any:
    """The global position of rank ``rank``'s position ``local``."""
    return (local // granule) * (granule * world) + rank * granule + local % granule


def rank_of_position(position: Any, world: Any, granule: Any) -> Any:
    """The rank that holds a global position."""
    return (position // granule) % world


def local_of(position: Any, world: Any, granule: Any) -> Any:
    """Where the rank that holds a global position keeps it."""
    return (position // (granule * world)) * granule + position % granule


def local_length(length: Any, rank: Any, world: Any, granule: Any) -> Any:
    """How many of the first ``length`` global positions rank ``rank`` holds: all of its first ones."""
    whole = granule * world
    rest = _less(length % whole, rank * granule)
    return (length // whole) * granule + _least(rest, granule)


def _less(a: Any, b: Any) -> Any:
    """``a - b``, but not below 0."""
    return _select(a > b, a - b, a - a)


def _least(a: Any, b: Any) -> Any:
    return _select(a < b, a, b)


def _select(condition: Any, if_true: Any, if_false: Any) -> Any:
    if isinstance(condition, bool):
        return if_true if condition else if_false
    return condition.select(if_true, if_false)
