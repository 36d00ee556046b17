# SPDX-License-Identifier: Apache-2.0
"""The back-off of waits that have already been long."""

from flycomm.primitives._override import overridable


@overridable
def pause() -> None:
    """Let this wave issue nothing for about half a microsecond. Called by any thread, in a wait; orders nothing.

    :mod:`~flycomm.primitives.poll` calls it between two looks at the clock, so never in the first 64 polls: a wait
    that is over by then pays nothing, and a longer one leaves the memory system to those who have work. The portable
    form does nothing: on the host target a poll that finds its word unchanged gives its core away by itself.
    """
