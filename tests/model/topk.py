# SPDX-License-Identifier: Apache-2.0
"""The abstract steps of the top-k exchange: tagged keys, a block a row, tokens, slots that rest.

A word is (tag, the call whose key it is). Row b is block b's, of one wave. In a call of n rows the grid is n blocks;
the blocks of the other rows do not exist in it. Tags count in a short cycle, so that a stale one comes round soon.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .flags import Epochs
from .steps import Await, Barrier, Do, Fault, Program, Step, Store, System, fixed

EMPTY = (0, 0)
EPOCHS = Epochs()
EVERYBODY = -1  # as an owner: the mode in which all ranks merge


class Registers(NamedTuple):
    epoch: int = 0  # of the block: how many calls had its row
    calls: int = 0  # of the channel
    failed: bool = False


@dataclass(frozen=True)
class Shape:
    world: int = 2
    rows: tuple[int, ...] = (1, 1, 1, 1)  # call by call
    owners: tuple[int, ...] = (EVERYBODY,)  # of every row, call by call, over and over
    words: tuple[int, ...] = (1,)  # of a row that a call asks for: its k; a slot holds the most of them
    first_epoch: int = 0
    limit: frozenset[tuple[int, int]] = frozenset()  # (rank, call) whose waits may give up at any time
    back: tuple[bool, ...] = (False,)  # whether the owner pushes its result to the others, call by call, over and over

    def owner(self, call: int) -> int:
        return self.owners[(call - 1) % len(self.owners)]

    def k(self, call: int) -> int:
        return self.words[(call - 1) % len(self.words)]

    def shares(self, call: int) -> bool:
        return self.back[(call - 1) % len(self.back)] and self.owner(call) != EVERYBODY

    def peers(self, rank: int) -> list[int]:
        return [q for q in range(self.world) if q != rank]


@dataclass(frozen=True)
class Variant:
    """The defaults are the protocol; every other value is a fault to find, or something that does as well."""

    tags: int = 3  # of the cycle: 255 in reality; odd, and no divisor of the epochs' in general
    counts: str = "rows"  # or "calls": every block counts every call
    fills: str = "slot"  # or "k": only the words that the call asks for are pushed and waited for
    reset: str = (
        "take"  # zero the words taken, in the same kernel; or "next": in the next call that has the row; "never"
    )
    token: bool = True  # from every block to every peer, where a row has an owner; waited for by the others
    buffer: str = "epoch"  # or "tag"
    buffers: int = 2
    compare: str = "equal"  # or "any": whatever is not zero
    marks: bool = False  # as in a larger kernel: whoever has a row waits for marks of all blocks of its rank first


def well(r: Registers) -> bool:
    return not r.failed


@dataclass(frozen=True)
class Block:
    """Of rank ``rank``: the steps of row ``row``."""

    shape: Shape
    v: Variant
    rank: int
    row: int

    def count(self, r: Registers) -> int:
        return r.epoch if self.v.counts == "rows" else r.calls

    def tag(self, r: Registers) -> int:
        return 1 + self.count(r) % self.v.tags

    def word(self, owner: int, source: int, i: int, ago: int = 0) -> Callable[[Registers], Any]:
        def address(r: Registers) -> Any:
            count = self.tag(r) if self.v.buffer == "tag" else self.count(r)
            return ("key", owner, self.row, (count - ago) % self.v.buffers, source, i)

        return address

    def used(self, call: int) -> range:
        return range(max(self.shape.words) if self.v.fills == "slot" else self.shape.k(call))

    def push(self, call: int) -> list[Step]:
        owner, peers = self.shape.owner(call), self.shape.peers(self.rank)
        to = [q for q in peers if owner in (EVERYBODY, q)]
        steps: list[Step] = []
        if owner != EVERYBODY and self.v.token:
            steps += [Store(fixed(("token", q, self.row, self.rank)), self.count, when=well) for q in peers]
        return steps + [
            Store(self.word(q, self.rank, i), lambda r: (self.tag(r), call), when=well)
            for q in to
            for i in self.used(call)
        ]

    def push_back(self, call: int) -> list[Step]:
        return [
            Store(self.word(q, self.rank, i), lambda r: (self.tag(r), call), when=well)
            for q in self.shape.peers(self.rank)
            for i in self.used(call)
        ]

    def sources(self, call: int) -> list[int]:
        """Of what this rank takes: of all, or of the owner."""
        owner = self.shape.owner(call)
        return self.shape.peers(self.rank) if owner in (EVERYBODY, self.rank) else [owner]

    def zero(self, call: int, ago: int) -> list[Step]:
        return [
            Store(self.word(self.rank, q, i, ago), fixed(EMPTY), when=well)
            for q in self.sources(call)
            for i in self.used(call)
        ]

    def wait(self, addresses: list[Any], ready: Any, judge: Any, call: int) -> Step:
        """Until ``ready``, or abort, or the limit."""
        count = len(addresses)

        def words(r: Registers) -> list[Any]:
            return [*(one(r) for one in addresses), *([("abort", self.rank)] if self.shape.limit else [])]

        def update(r: Registers, seen: tuple[Any, ...]) -> Registers:
            return judge(r, seen[:count]) if ready(r, seen[:count]) else r._replace(failed=True)

        limit = (lambda r: r._replace(failed=True)) if (self.rank, call) in self.shape.limit else None
        return Await(words, lambda r, seen: ready(r, seen[:count]) or any(seen[count:]), update, limit, when=well)

    def take(self, call: int) -> list[Step]:
        def ready(r: Registers, seen: tuple[Any, ...]) -> bool:
            return all(tag == self.tag(r) if self.v.compare == "equal" else tag for tag, _ in seen)

        def judge(r: Registers, seen: tuple[Any, ...]) -> Registers:
            found = tuple(of for _, of in seen)
            if any(of != call for of in found):
                raise Fault(f"call {call} takes the keys of calls {found}")
            return r

        words = [self.word(self.rank, q, i) for q in self.sources(call) for i in self.used(call)]
        steps = [self.wait(words, ready, judge, call)]
        return steps + (self.zero(call, 0) if self.v.reset == "take" else [])

    def await_tokens(self, call: int) -> list[Step]:
        def ready(r: Registers, seen: tuple[Any, ...]) -> bool:
            return all(EPOCHS.arrived(one, self.count(r)) for one in seen)

        def judge(r: Registers, seen: tuple[Any, ...]) -> Registers:
            if not all(EPOCHS.in_step(one, self.count(r)) for one in seen):
                raise Fault(f"desync: call {call} sees tokens {seen}")
            return r

        tokens = [fixed(("token", self.rank, self.row, q)) for q in self.shape.peers(self.rank)]
        return [self.wait(tokens, ready, judge, call)] if self.v.token else []

    def meet(self, call: int, here: bool) -> list[Step]:
        """Ready marks: every block of the grid makes one, if no wait of it has failed."""
        marks = [fixed(("mark", self.rank, row)) for row in range(max(self.shape.rows))]
        wait = self.wait(marks, lambda r, seen: all(one >= call for one in seen), lambda r, seen: r, call)
        return [Store(marks[self.row], fixed(call), when=well), *([wait] if here else [])]

    def give_up(self) -> list[Step]:
        ranks = range(self.shape.world) if self.shape.limit else ()
        return [Store(fixed(("abort", q)), fixed(True), when=lambda r: r.failed) for q in ranks]

    def program(self) -> Program:
        steps: list[Step] = []
        taken = 0  # the last call in which this block took something
        for call, rows in enumerate(self.shape.rows, 1):
            here = self.row < rows
            steps.append(Do(lambda r, here=here: count(r, here)))
            steps += self.meet(call, here) if self.v.marks else []
            if here:
                if self.v.reset == "next" and taken:
                    steps += self.zero(taken, 1)
                steps += self.push(call)
                if self.shape.owner(call) in (EVERYBODY, self.rank):
                    steps += self.take(call)
                    taken = call
                    if self.shape.shares(call):
                        steps += self.push_back(call)
                else:
                    steps += self.await_tokens(call)
                    steps += self.take(call) if self.shape.shares(call) else []
                    taken = 0
                steps += self.give_up()
            steps.append(Barrier((self.rank,), drain=True))
        return tuple(steps)


def count(r: Registers, here: bool) -> Registers:
    return r._replace(calls=EPOCHS.next(r.calls), epoch=EPOCHS.next(r.epoch) if here else r.epoch)


def system(shape: Shape, v: Variant) -> System:
    ranks, rows = range(shape.world), range(max(shape.rows))
    memory: dict[Any, Any] = {}
    for r in ranks:
        memory["abort", r] = False
        for row in rows:
            memory["mark", r, row] = 0
            for q in shape.peers(r):
                memory["token", r, row, q] = shape.first_epoch
                for buffer in range(v.buffers):
                    memory |= {("key", r, row, buffer, q, i): EMPTY for i in range(max(shape.words))}
    start = Registers(epoch=shape.first_epoch, calls=shape.first_epoch)
    return System(
        waves={(r, row, 0): (Block(shape, v, r, row).program(), start) for r in ranks for row in rows}, memory=memory
    )
