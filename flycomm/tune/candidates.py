# SPDX-License-Identifier: Apache-2.0
"""What is worth measuring for a message: protocols, grids, and how much a looping protocol sends in one piece.

In stages, each for what the one before left: every protocol on its usual grid; the grids of the protocols that came
close; the pieces of the looping ones. A usual grid has a fragment of 16 bytes a thread, until it is full: that was
best in every protocol on two H200s (docs/facts.md); other grids have up to four fragments a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flycomm.channel import FRAGMENT_BYTES
from flycomm.geometry import Geometry, size_class
from flycomm.tables import LOOPING, PROTOCOLS, Row, carries

CLOSE = 1.25  # times the best; a protocol that is slower on its usual grid is left there
LIKELY = 3  # of the fastest candidates; what is measured again, or in another mode
_LARGEST_WHOLE = {"packets": 512 << 10, "sentinel": 4 << 20}  # bytes; these double, or clean up, what they send
_SMALLEST_TWO_SHOT = 32 << 10  # bytes; below, two link latencies are all that counts
_USUAL_PIECE = 2 << 20  # bytes
_MOST_BLOCKS = 128


@dataclass(frozen=True)
class Grids:
    """``units``: compute units of the device. ``threads``: of a block, the usual number first. ``parts``: one in so
    many of the blocks that a fragment a thread takes. ``pieces``: capacities of looping protocols, bytes."""

    units: int
    threads: tuple[int, ...]
    parts: tuple[int, ...]
    pieces: tuple[int, ...]

    @classmethod
    def of(cls, units: int, graphs: bool, quick: bool) -> Grids:
        """``graphs``: whether the target is a GPU, which runs the threads of a block at the same time."""
        if quick:
            return cls(units, (256, 512) if graphs else (64,), (1, 2), (1 << 20, 8 << 20))
        return cls(units, (256, 128, 512) if graphs else (64, 128), (1, 2, 4), tuple(512 << 10 << i for i in range(5)))

    def usual(self, num_bytes: int) -> Geometry:
        return Geometry(self._blocks(num_bytes, self.threads[0]), self.threads[0])

    def all(self, num_bytes: int) -> list[Geometry]:
        """The usual grid first. None with more than twice the threads that have something to do."""
        busy = 2 * -(-num_bytes // FRAGMENT_BYTES)
        found = [
            Geometry(max(1, self._blocks(num_bytes, threads) // part), threads)
            for threads in self.threads
            for part in self.parts
            if threads == self.threads[0] or threads <= busy
        ]
        return list(dict.fromkeys(found))

    def a_block_each(self, count: int) -> int:
        """Blocks, a power of two, until the grid is full."""
        most = 1 << min(_MOST_BLOCKS, self.units).bit_length() - 1
        return min(most, 1 << (count - 1).bit_length())

    def _blocks(self, num_bytes: int, threads: int) -> int:
        return self.a_block_each(-(-num_bytes // (FRAGMENT_BYTES * threads)))


@dataclass(frozen=True, order=True)
class Candidate:
    """A protocol, a grid and a capacity that may carry messages of one size; the capacity is what they need at most."""

    protocol: str
    blocks: int
    threads: int
    capacity: int  # bytes

    @classmethod
    def of(cls, protocol: str, grid: Geometry, num_bytes: int, piece: int) -> Candidate:
        """For ``num_bytes``, in pieces of ``piece`` bytes where the protocol can."""
        whole = size_class(num_bytes)
        return cls(protocol, grid.blocks, grid.threads, min(piece, whole) if protocol in LOOPING else whole)

    @classmethod
    def in_force(cls, row: Row, num_bytes: int) -> Candidate:
        """What a row of a table comes to for ``num_bytes``, of which it is the row."""
        return cls.of(row.protocol, row.geometry, num_bytes, row.capacity)

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.blocks, self.threads)

    def __str__(self) -> str:
        return f"{self.protocol} {self.blocks} × {self.threads}"

    def row(self, op: str, worlds: tuple[int, int], largest: int | None) -> Row:
        return Row(op, worlds, "any", largest, self.protocol, self.blocks, self.threads, self.capacity)


Times = Mapping[Candidate, float]  # µs a call
Stage = Callable[[Any, Times], list[Candidate]]  # of a size, what is worth measuring after what was


def stages(op: str, world: int, grids: Grids, fits: Callable[[Geometry], bool]) -> tuple[Stage, ...]:
    """What to measure of ``op`` on ``world`` ranks, stage by stage. ``fits``: grids that may wait on the device."""

    def fitting(found: Iterable[Candidate]) -> list[Candidate]:
        return [one for one in dict.fromkeys(found) if fits(one.geometry)]

    def first(num_bytes: int, times: Times) -> list[Candidate]:
        return fitting(
            Candidate.of(protocol, grids.usual(_share(protocol, num_bytes, world)), num_bytes, _USUAL_PIECE)
            for protocol in _protocols(op, world, num_bytes)
        )

    def other_grids(num_bytes: int, times: Times) -> list[Candidate]:
        return fitting(
            Candidate.of(protocol, grid, num_bytes, _USUAL_PIECE)
            for protocol in _protocols(op, world, num_bytes)
            if protocol in close(times)
            for grid in grids.all(_share(protocol, num_bytes, world))
        )

    def pieces(num_bytes: int, times: Times) -> list[Candidate]:
        best = {protocol: candidate for protocol, candidate in close(times).items() if protocol in LOOPING}
        return fitting(
            Candidate.of(protocol, candidate.geometry, num_bytes, piece)
            for protocol, candidate in best.items()
            for piece in grids.pieces
        )

    return first, other_grids, pieces


def fastest(times: Times, count: int) -> list[Candidate]:
    """The first ``count`` candidates by time."""
    return sorted(times, key=lambda one: times[one])[:count]


def worth_whole(protocol: str, num_bytes: int) -> bool:
    """Whether what a protocol does to every byte may be paid for so many."""
    return num_bytes <= _LARGEST_WHOLE.get(protocol, num_bytes)


def _protocols(op: str, world: int, num_bytes: int) -> list[str]:
    return [
        protocol
        for protocol in PROTOCOLS
        if carries(protocol, op, "sum")
        and worth_whole(protocol, num_bytes)
        and (protocol != "two_shot" or (world > 1 and num_bytes >= _SMALLEST_TWO_SHOT))
    ]


def _share(protocol: str, num_bytes: int, world: int) -> int:
    """Bytes that the grid goes over at a time: two-shot reduces one slice of ``world``."""
    return -(-num_bytes // world) if protocol == "two_shot" else num_bytes


def close(times: Times) -> dict[str, Candidate]:
    """The fastest candidate of every protocol that is close to the best."""
    best: dict[str, Candidate] = {}
    for candidate in fastest(times, len(times)):
        if times[candidate] <= CLOSE * min(times.values()):
            best.setdefault(candidate.protocol, candidate)
    return best
