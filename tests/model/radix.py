# SPDX-License-Identifier: Apache-2.0
"""The abstract steps of the top-k exchange by radix: rounds of histograms, then a list of which each has a part.

A word is (tag, what it is of): a round's histogram, or a row's list. A block does one row after the other; a kernel has
one row of the block or several. Wave 0 sends and takes histograms; the last wave sends and takes lists, so with two
waves everything that orders one after the other is a block barrier. Tags count in a short cycle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .flags import Epochs
from .steps import Await, Barrier, Do, Drain, Fault, Program, Step, Store, System, fixed

EMPTY = (0, None)
EPOCHS = Epochs()
EVERYBODY = -1  # as an owner: all ranks get the row


class Registers(NamedTuple):
    epoch: int = 0
    failed: bool = False


@dataclass(frozen=True)
class Shape:
    world: int = 2
    rounds: tuple[int, ...] = (1, 1, 1)  # row by row
    lists: tuple[tuple[int, ...], ...] = ((0, 1),)  # row by row, over and over: whose each position is
    owners: tuple[int, ...] = (EVERYBODY,)  # row by row, over and over
    kernels: tuple[int, ...] = (1, 1, 1)  # how many rows each has
    waves: int = 1
    first_epoch: int = 0
    limit: frozenset[tuple[int, int]] = frozenset()  # (rank, row) whose waits may give up at any time

    def peers(self, rank: int) -> list[int]:
        return [q for q in range(self.world) if q != rank]

    def gets(self, rank: int, row: int) -> bool:
        return self.owners[row % len(self.owners)] in (EVERYBODY, rank)

    def list(self, row: int) -> tuple[int, ...]:
        return self.lists[row % len(self.lists)]


@dataclass(frozen=True)
class Variant:
    """The defaults are the protocol; every other value is a fault to find, or something that does as well."""

    tags: int = 3
    buffers: int = 2  # of histograms; of lists there is one
    reset: bool = True  # who takes a word of a list zeroes it
    fence: bool = True  # every wave waits for its own stores before the barrier that ends a row
    ends: bool = True  # a block barrier between the takes of a row's list and the next row's first histogram
    sums: bool = True  # a block barrier between the takes of a histogram and what follows from it
    compare: str = "equal"  # or "any": whatever is not zero


def well(r: Registers) -> bool:
    return not r.failed


@dataclass(frozen=True)
class Wave:
    shape: Shape
    v: Variant
    rank: int
    wave: int

    def tag(self, r: Registers) -> int:
        return 1 + r.epoch % self.v.tags

    def histogram(self, at: int, source: int) -> Callable[[Registers], Any]:
        return lambda r: ("histogram", at, r.epoch % self.v.buffers, source)

    def take(self, addresses: list[Any], what: Any, row: int) -> Step:
        """Until every word has the tag, or abort, or the limit; every word has to be ``what``."""
        count = len(addresses)

        def arrived(r: Registers, seen: tuple[Any, ...]) -> bool:
            return all(tag == self.tag(r) if self.v.compare == "equal" else tag for tag, _ in seen[:count])

        def words(r: Registers) -> list[Any]:
            return [*(one(r) for one in addresses), *([("abort", self.rank)] if self.shape.limit else [])]

        def update(r: Registers, seen: tuple[Any, ...]) -> Registers:
            if not arrived(r, seen):
                return r._replace(failed=True)
            if any(of != what for _, of in seen[:count]):
                raise Fault(f"{what} takes {[of for _, of in seen[:count]]}")
            return r

        limit = (lambda r: r._replace(failed=True)) if (self.rank, row) in self.shape.limit else None
        return Await(words, lambda r, seen: arrived(r, seen) or any(seen[count:]), update, limit, when=well)

    def round(self, row: int, number: int) -> list[Step]:
        what, peers = (row, number), self.shape.peers(self.rank)
        steps: list[Step] = [Do(lambda r: r._replace(epoch=EPOCHS.next(r.epoch)))]
        if self.wave == 0:
            steps += [Store(self.histogram(q, self.rank), lambda r: (self.tag(r), what), when=well) for q in peers]
            steps += [self.take([self.histogram(self.rank, q) for q in peers], what, row), *self.give_up()]
        return steps + ([Barrier((self.rank,))] if self.v.sums else [])

    def lists(self, row: int) -> list[Step]:
        if self.wave != self.shape.waves - 1:
            return []
        whose = self.shape.list(row)
        steps: list[Step] = [
            Store(fixed(("list", q, i)), lambda r: (self.tag(r), row), when=well)
            for i, of in enumerate(whose)
            for q in self.shape.peers(self.rank)
            if of == self.rank and self.shape.gets(q, row)
        ]
        mine = [("list", self.rank, i) for i, of in enumerate(whose) if of != self.rank]
        if self.shape.gets(self.rank, row) and mine:
            steps += [self.take([fixed(one) for one in mine], row, row), *self.give_up()]
            steps += [Store(fixed(one), fixed(EMPTY), when=well) for one in mine if self.v.reset]
        return steps

    def give_up(self) -> list[Step]:
        ranks = range(self.shape.world) if self.shape.limit else ()
        return [Store(fixed(("abort", q)), fixed(True), when=lambda r: r.failed) for q in ranks]

    def program(self) -> Program:
        steps: list[Step] = []
        row = 0
        for rows in self.shape.kernels:
            for _ in range(rows):
                for number in range(self.shape.rounds[row]):
                    steps += self.round(row, number)
                steps += self.lists(row)
                steps += [Drain()] if self.v.fence else []
                steps += [Barrier((self.rank,))] if self.v.ends else []
                row += 1
            steps.append(Barrier((self.rank,), drain=True))
        return tuple(steps)


def system(shape: Shape, v: Variant) -> System:
    ranks = range(shape.world)
    memory: dict[Any, Any] = {("abort", r): False for r in ranks}
    for r in ranks:
        memory |= {("list", r, i): EMPTY for i in range(max(map(len, shape.lists)))}
        for q in shape.peers(r):
            memory |= {("histogram", r, buffer, q): EMPTY for buffer in range(v.buffers)}
    start = Registers(epoch=shape.first_epoch)
    return System(
        waves={(r, 0, wave): (Wave(shape, v, r, wave).program(), start) for r in ranks for wave in range(shape.waves)},
        memory=memory,
    )
