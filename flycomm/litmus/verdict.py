# SPDX-License-Identifier: Apache-2.0
"""What an outcome is called, and whether it is weak, or forbidden."""

from __future__ import annotations

from flycomm.kernels._litmus_plan import NEW_OLD, SIGHTS

CASES = (
    ("mp", "relaxed"),
    ("mp", "library"),
    ("mp_far", "relaxed"),
    ("mp_far", "library"),
    ("sb", "relaxed"),
    ("sb", "library"),
    ("sb", "fenced"),
    ("iriw", "relaxed"),
    ("iriw", "library"),
    ("iriw", "fenced"),
    ("coherence", "relaxed"),
)
"""(shape, order), as they are run."""

_FORBIDDEN = (("mp", "library"), ("mp_far", "library"), ("sb", "fenced"), ("iriw", "fenced"), ("coherence", "relaxed"))
_BOTH_WAYS = ("mp", "mp_far", "coherence")  # what one actor sees is weak by itself; of the others both have to
_SEEN = {
    "mp": {3: "new", 2: "stale"},
    "mp_far": {3: "new", 2: "stale"},
    "sb": {3: "new", 2: "old"},
    "iriw": {0: "old old", 1: "old new", 2: "new old", 3: "new new"},
    "coherence": {0: "old old", 1: "old new", 2: "new old", 3: "new new"},
}


def forbids_weak(shape: str, order: str) -> bool:
    """Whether the weak outcome must not be seen; an impossible one never may."""
    return (shape, order) in _FORBIDDEN


def is_weak(shape: str, outcome: int) -> bool:
    own, partner = divmod(outcome, SIGHTS)
    if shape in _BOTH_WAYS:
        return NEW_OLD in (own, partner)
    return own == partner == NEW_OLD


def is_impossible(shape: str, outcome: int) -> bool:
    """A word was neither of this round nor of the one before, or torn, or what the partner saw did not come."""
    return any(sight not in _SEEN[shape] for sight in divmod(outcome, SIGHTS))


def name_of(shape: str, outcome: int) -> str:
    """What the two actors of a pair saw: ``new old | new new``."""
    return " | ".join(_SEEN[shape].get(sight, "impossible") for sight in divmod(outcome, SIGHTS))
