# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of epochs, one definition for host code, traced code and tests.

Epochs are 32-bit words that run 1 … :data:`EPOCH_LAST`, then 1 again; 0 is never an epoch, so zeroed memory matches
none. The length of the cycle is a multiple of 6: ``e % 2`` and ``e % 3`` step by one across the wrap too. The cycle is
4 shorter than the word's, so a difference of words counts calls only on one side of the wrap: its *sign* is always
right (while two epochs are fewer than 2**31 - 4 calls apart), its size is not. ``docs/memory_model.md`` has the proof.

Words are ``fx.Uint32`` or ``fx.Int32`` in a kernel (a load gives ``Int32`` unless it is told a dtype), ``int``,
0 … 2**32 - 1, on the host. So nothing here orders, divides or shifts: only ``+ - & | ==``, which mean the same for
both; and constants take the type of the argument, because a bare Python int above 2**31 equals no ``fx`` word. Whoever
takes ``e % 3`` converts to ``fx.Uint32`` first.
"""

from __future__ import annotations

from typing import Any

EPOCH_LAST = 0xFFFFFFFC

_SIGN = 0x80000000


def next_epoch(e: Any) -> Any:
    """The epoch after ``e``: 1 after :data:`EPOCH_LAST`, and 1 after 0, the word of a channel never used."""
    word = type(e)
    return _select(e == word(EPOCH_LAST), word(1), e + word(1))


def previous_epoch(e: Any) -> Any:
    """The epoch before ``e`` (1 … :data:`EPOCH_LAST`); before 1 it is :data:`EPOCH_LAST`, never 0."""
    word = type(e)
    return _select(e == word(1), word(EPOCH_LAST), e - word(1))


def arrived(seen: Any, e: Any) -> Any:
    """Whether a word that holds ``seen`` has reached ``e``: ``int32(seen - e) >= 0``. A wait ends when this holds.

    Zero has not reached ``e`` only while ``e`` <= 2**31: who starts a channel at another epoch than 1 sets its pads to
    the epoch before, like its state.
    """
    word = type(e)
    return ((seen - e) & word(_SIGN)) == word(0)


def in_step(seen: Any, e: Any) -> Any:
    """Whether a peer whose word is ``seen`` is at call ``e`` or one ahead. Arrived but not in step: a desync."""
    return (seen == e) | (seen == next_epoch(e))


def _select(condition: Any, if_true: Any, if_false: Any) -> Any:
    if isinstance(condition, bool):
        return if_true if condition else if_false
    return condition.select(if_true, if_false)
