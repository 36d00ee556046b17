# SPDX-License-Identifier: Apache-2.0
"""From records of blocks to events that Perfetto and chrome://tracing read. No device, no torch."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flycomm.primitives.trace import KINDS, RECORD_BYTES

_RECORD = struct.Struct("<qIi16s")
assert _RECORD.size == RECORD_BYTES

Round = tuple[int, int]  # ticks of a rank's clock when it arrived at a barrier, and when it left it


class Record(NamedTuple):
    """``clock`` in ticks of the device; ``kind`` of ``primitives.trace.KINDS``."""

    clock: int
    kind: str
    value: int
    name: str


@dataclass(frozen=True)
class Track:
    """What one block of a channel recorded, in its order; ``dropped``: how many records found no room after that."""

    channel: str
    block: int
    records: tuple[Record, ...]
    dropped: int


@dataclass(frozen=True)
class RankTrace:
    """All of a rank. ``rounds``: barriers of all ranks, which every rank has equally many of, to compare clocks by."""

    clock_hz: int
    tracks: tuple[Track, ...]
    rounds: tuple[Round, ...]

    @property
    def base(self) -> int:
        """A tick near all others: clocks may count from 1970, and seconds since then lose the nanoseconds."""
        return self.rounds[0][0]

    def seconds(self, clock: int) -> float:
        """Since the base."""
        return (clock - self.base) / self.clock_hz


def parse(data: bytes) -> tuple[Record, ...]:
    """The records in ``data``, a whole number of them."""
    return tuple(
        Record(clock, KINDS[kind], value, name.rstrip(b"\0").decode())
        for clock, kind, value, name in _RECORD.iter_unpack(data)
    )


def offset(first: RankTrace, other: RankTrace) -> tuple[float, float]:
    """What to add to another rank's seconds to get the first's, and by how much that may be wrong, in seconds.

    Nobody leaves a barrier before everybody has arrived. So with x the offset, in every round ``left + x`` of the other
    is not before ``arrived`` of the first, and ``left`` of the first not before ``arrived + x`` of the other: the
    rounds leave an interval, as wide as the way there and back. Its middle is taken; if clocks drift so much that none
    is left, the middle of what is missing.
    """
    pairs = list(zip(first.rounds, other.rounds, strict=True))
    low = max(first.seconds(mine[0]) - other.seconds(theirs[1]) for mine, theirs in pairs)
    high = min(first.seconds(mine[1]) - other.seconds(theirs[0]) for mine, theirs in pairs)
    return (low + high) / 2, abs(high - low) / 2


def chrome(ranks: Sequence[RankTrace], about: dict[str, Any]) -> dict[str, Any]:
    """The file's contents: a process a rank, a thread a block; times in µs since the first record, by rank 0's clock.

    Slices ("X") for what has a begin and an end, and for stages; moments ("i") for marks. ``otherData``: ``about``,
    by how many µs each rank's clock may be misplaced, and how many records were dropped.
    """
    shifts = [(0.0, 0.0), *(offset(ranks[0], one) for one in ranks[1:])]
    starts = [
        one.seconds(record.clock) + shift
        for one, (shift, _) in zip(ranks, shifts, strict=True)
        for track in one.tracks
        for record in track.records[:1]
    ]
    zero = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    for rank, (one, (shift, _)) in enumerate(zip(ranks, shifts, strict=True)):
        events.append(_names("process_name", rank, 0, f"rank {rank}"))
        for thread, track in enumerate(one.tracks, 1):
            events.append(_names("thread_name", rank, thread, f"{track.channel} block {track.block}"))
            for event in sorted(_events(track.records), key=lambda event: (event["start"], -event["stop"])):
                start, stop = (1e6 * (one.seconds(event.pop(edge)) + shift - zero) for edge in ("start", "stop"))
                length = {"dur": round(stop - start, 4)} if event["ph"] == "X" else {"s": "t"}
                events.append(event | length | {"ts": round(start, 4), "pid": rank, "tid": thread})
    clocks = [{"uncertain_us": 1e6 * error} for _, error in shifts]
    dropped = [sum(track.dropped for track in one.tracks) for one in ranks]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": about | {"clocks": clocks, "dropped": dropped},
    }


def _names(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}


def _events(records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """Slices and moments of a block, ``start`` and ``stop`` in ticks; what has no end goes on to the last record."""
    open_: list[Record] = []
    for record in records:
        if record.kind == "mark":
            yield _event(record, record.clock)
            continue
        closes_stage = record.kind == "stage" or record.name == "call"
        if closes_stage and (stage := next((one for one in open_ if one.kind == "stage"), None)):
            open_.remove(stage)
            yield _event(stage, record.clock)
        if record.kind != "end":
            open_.append(record)
        elif begun := next((one for one in reversed(open_) if (one.kind, one.name) == ("begin", record.name)), None):
            open_.remove(begun)
            yield _event(begun, record.clock)
    for one in open_:
        yield _event(one, records[-1].clock) | {"args": {"value": one.value, "unfinished": True}}


def _event(record: Record, stop: int) -> dict[str, Any]:
    moment = record.kind == "mark"
    return {
        "ph": "i" if moment else "X",
        "name": record.name,
        "cat": "stage" if record.kind == "stage" else "protocol",
        "start": record.clock,
        "stop": stop,
        "args": {"value": record.value},
    }
