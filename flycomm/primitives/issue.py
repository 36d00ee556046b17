# SPDX-License-Identifier: Apache-2.0
"""In which order a thread's loads are issued, where a compiler chooses a worse one. No result depends on it."""

from __future__ import annotations

from flycomm.primitives._override import overridable


@overridable
def loads_before() -> None:
    """The loads that stand before this are issued before those that stand after it.

    For a load whose answer is needed first: a compiler may put it behind the use of another one's, and so behind a trip
    to memory. Called by every thread of a warp together. Orders nothing for other threads; nothing where compilers keep
    the order of the source.
    """
