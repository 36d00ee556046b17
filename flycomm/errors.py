# SPDX-License-Identifier: Apache-2.0
"""Every exception flycomm raises on purpose. Messages are one sentence: the value, the limit, the remedy."""

from __future__ import annotations

from dataclasses import dataclass


class CommError(RuntimeError):
    """Base of every error that flycomm raises on purpose."""


class UsageError(CommError, ValueError):
    """A caller passed something this library cannot do; nothing was launched."""


class ClosedError(CommError):
    """A communicator or buffer was used after ``close()``."""


class TargetError(CommError):
    """A target cannot be used here: a driver, a compiler or a device is missing."""


class UnsupportedOnTarget(TargetError):
    """A kernel uses an operation that a target cannot lower; the message names both."""


class PeerAccessError(CommError):
    """Ranks cannot map, or cannot use, each other's memory. Raised on all ranks alike."""


class DisagreementError(CommError):
    """Ranks called the same collective with different arguments; the message names both sides."""


class StreamError(CommError):
    """A channel was used from a stream other than the one its lane belongs to."""


class ResidencyError(CommError):
    """Kernels that wait for peers would not all be resident at once; the message has the numbers."""


@dataclass(frozen=True)
class TimeoutRecord:
    """What the first failing block of a rank saw when it gave up.

    ``expected`` and ``seen`` are the low 32 bits of the word that was waited for. ``phase`` is a name from
    :data:`flycomm.channel.PHASES`. ``reason`` is ``"timeout"``, ``"abort"`` (a peer gave up first), ``"desync"``
    (a peer is at another call), ``"mismatch"`` (a peer's call is of another kind, dtype or size) or ``"overlap"`` (two
    launches used one channel at the same time).
    """

    rank: int
    channel: int
    block: int
    phase: str
    peer: int
    expected: int
    seen: int
    reason: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}, channel {self.channel}, block {self.block}, phase {self.phase}: {self.reason} "
            f"waiting for peer {self.peer} (expected {self.expected}, seen {self.seen})"
        )


class CommTimeout(CommError):
    """A bounded wait inside a kernel gave up. The channel is poisoned until ``recover()``."""

    def __init__(self, message: str, record: TimeoutRecord | None = None):
        super().__init__(message)
        self.record = record
