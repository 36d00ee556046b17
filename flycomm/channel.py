# SPDX-License-Identifier: Apache-2.0
"""The one layout of signal pads, staging and per-block state, in plain ``+`` and ``*``.

Host code calls these functions with Python ints, traced kernels call the same ones with FlyDSL integers, and the
tests check both. All offsets are bytes.

A rank's *segment* of a channel is peer-mapped memory (PROTOCOLS, "Words")::

    0                 abort word: 8 bytes, non-zero once a peer gave up
    SIGNALS           blocks × MAX_WORLD signal words of 8 bytes: low half the epoch, high half the call's tag
    staging_base()    2 or 3 buffers × world slots of `capacity` bytes, slot s written by rank s

A rank's *state* of a channel is ordinary device memory that no peer sees: 16 bytes a block (epoch, poisoned, dirty
length, spare; in block 0 the spare word says that a block has claimed the record), after ``TRACE_BYTES`` that say
where traced kernels put what they record. Its *record* is memory that the host reads while kernels run.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from flycomm.errors import TimeoutRecord

MAX_WORLD = 8  # ranks
FRAGMENT_BYTES = 16  # what one thread moves at a time
SIGNAL_BYTES = 8
SIGNALS = 128  # offset of the first signal word; the abort word has a cache line of its own
STATE_BYTES = 16  # a block
TRACE_BYTES = 16  # before a channel's state: address and room of its trace, zeros for none
DIRTY = 8  # offset in a block's state: fragments that its last call filled (sentinels)
PACKETS_BYTES = 32  # a fragment as packets: 4 bytes of data and 4 of tag, four times
SENTINEL = 0x80000000  # what staging that has not been written holds, where data carries no tag
BUFFERS = {"flags": 2, "packets": 2, "sentinel": 3}  # staging slots a source, by protocol
RECORD_BYTES = 64  # a channel
SEGMENT_ALIGN = 4096
USER_CHANNELS = 16  # of put_signal and wait_signal

PHASES = (
    "enter",
    "signal",
    "barrier",
    "put_signal",
    "wait_signal",
    "packet",
    "sentinel",
    "ready",
    "candidate",
    "token",
)
REASONS = ("none", "timeout", "abort", "desync", "mismatch", "overlap")


def signal_offset(block: Any, source: Any) -> Any:
    """Of the word that rank ``source``'s block ``block`` writes in this segment."""
    return SIGNALS + block * (MAX_WORLD * SIGNAL_BYTES) + source * SIGNAL_BYTES


def staging_base(blocks: int) -> int:
    """Of the first staging slot; a whole number of cache lines."""
    return SIGNALS + -(-blocks * MAX_WORLD * SIGNAL_BYTES // 128) * 128


def staging_offset(blocks: int, world: Any, capacity: Any, buffer: Any, source: Any) -> Any:
    """Of the slot of ``capacity`` bytes that rank ``source`` fills in calls whose epoch selects ``buffer``."""
    return staging_base(blocks) + (buffer * world + source) * capacity


def segment_bytes(blocks: int, world: int, capacity: int, buffers: int = 2) -> int:
    """Of a whole segment, rounded up so that segments can stand one after the other."""
    used = staging_offset(blocks, world, capacity, buffers, 0)
    return -(-used // SEGMENT_ALIGN) * SEGMENT_ALIGN


def state_offset(block: Any) -> Any:
    """Of a block's state; the epoch is the word at +0, the poison mark the word at +4."""
    return block * STATE_BYTES


def sent_offset(channel: Any, peer: Any) -> Any:
    """In the state of the signal channel: how many signals this rank has put to ``peer`` on a user channel."""
    return STATE_BYTES + (channel * MAX_WORLD + peer) * 8


def received_offset(channel: Any, peer: Any) -> Any:
    """In the state of the signal channel: how many signals from ``peer`` this rank has waited for."""
    return sent_offset(channel, peer) + 4


_RECORD = struct.Struct("<8I")


@dataclass(frozen=True)
class Record:
    """The words of a record: ``valid`` is written last, by the one block that won the right to write it."""

    valid: int
    block: int
    phase: int
    peer: int
    expected: int
    seen: int
    reason: int
    claimed: int

    @classmethod
    def parse(cls, data: bytes) -> Record:
        return cls(*_RECORD.unpack_from(data))

    def explain(self, rank: int, channel: int) -> TimeoutRecord:
        return TimeoutRecord(
            rank=rank,
            channel=channel,
            block=self.block,
            phase=PHASES[self.phase],
            peer=self.peer,
            expected=self.expected,
            seen=self.seen,
            reason=REASONS[self.reason],
        )
