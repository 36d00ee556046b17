# SPDX-License-Identifier: Apache-2.0
"""The abstract steps of the one-shot all-reduce whose data carries its own mark: packets (a tag) and sentinels.

No flag and no fence: a thread posts its slot to every peer and polls its own until all marks are there. Slot t is
thread t's of the grid, always; in a call that is shorter than t it carries nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .flags import Epochs
from .steps import Await, Barrier, Do, Drain, Fault, Load, Program, Step, Store, Swap, System, Write, fixed

Word = tuple[int, int]  # (mark, the call whose data it is); mark 0: nothing has arrived
EMPTY: Word = (0, 0)
EPOCHS = Epochs()


class Registers(NamedTuple):
    epoch: int = 0
    began: int = 0  # the epoch read at entry
    uses: int = 0  # of this thread's slot
    failed: bool = False  # a wait of this thread, or the channel is poisoned


@dataclass(frozen=True)
class Shape:
    world: int = 2
    blocks: int = 2
    threads: int = 1  # a block
    lengths: tuple[int, ...] = (2, 1, 1, 2)  # slots with data, call by call
    calls_per_launch: int = 1
    halves: int = 1  # words in a slot
    first_epoch: int = 0
    impatient: frozenset[int] = frozenset()  # ranks whose waits may give up at any time

    def peers(self, rank: int) -> list[int]:
        return [q for q in range(self.world) if q != rank]

    def epoch(self, call: int) -> int:
        e = self.first_epoch
        for _ in range(call):
            e = EPOCHS.next(e)
        return e


@dataclass(frozen=True)
class Variant:
    """The defaults are the packets; every other value but those of :data:`SENTINEL` is a fault to find, or a remedy."""

    buffers: int = 2
    compare: str = "equal"  # or "reached", "first" (of a slot's words), "present" (sentinels), "never"
    tag_bits: int = 0  # of the tag, if it is narrower than the epoch
    nobody: frozenset[tuple[int, int]] = frozenset()  # (rank, call) in which a rank waits for nobody
    tail: str = "padded"  # or "unsent", "unwaited": the last word of a call's last slot
    idle: str = "rests"  # or "empty": a thread without data posts and waits all the same
    every: int = 0  # in calls whose epoch modulo this is 0 or 1, threads without data do so
    counts: str = "calls"  # or "uses": buffer and tag count the uses of the slot
    barrier: str = "posts"  # of the block, after every call's posts; or "none"; or "takes": one more, after its takes
    rotate: bool = False  # slot t is thread (t + call)'s
    alive: str = "rank"  # who has failed is silent in later launches: the rank, or the "block"

    clear: int = 0  # sentinels: how many buffers on lies the one to clear
    dirty: str = "previous"  # or "current": the call whose length says how much
    sanitise: bool = True
    minus_zero: frozenset[int] = frozenset()  # calls whose data is the sentinel itself
    fence: bool = True  # between a clear and the same thread's next post, where no kernel ends between them


SENTINEL = Variant(buffers=3, compare="present", clear=2)


@dataclass(frozen=True)
class Thread:
    """One thread's program."""

    shape: Shape
    v: Variant
    rank: int
    block: int
    thread: int

    def slot(self, call: int) -> int:
        grid = self.shape.blocks * self.shape.threads
        mine = self.block * self.shape.threads + self.thread
        return (mine - call) % grid if self.v.rotate else mine

    def takes_part(self, call: int) -> bool:
        shape, v = self.shape, self.v
        full = v.idle == "empty" or (v.every and shape.epoch(call) % v.every < 2)
        return bool(full) or self.slot(call) < shape.lengths[call - 1]

    def halves(self, call: int, short: str) -> range:
        last = self.slot(call) == self.shape.lengths[call - 1] - 1
        return range(self.shape.halves - (last and self.v.tail == short))

    def index(self, r: Registers) -> int:
        return r.uses if self.v.counts == "uses" else r.epoch

    def mark(self, r: Registers) -> int:
        if self.v.compare == "present":
            return 1
        return self.index(r) % 2**self.v.tag_bits if self.v.tag_bits else self.index(r)

    def words(self, r: Registers, owner: int, source: int, slot: int, halves: range, ahead: int = 0) -> list[Any]:
        buffer = (self.index(r) + ahead) % self.v.buffers
        return [("slot", owner, buffer, source, slot, half) for half in halves]

    # ---- the parts of a call

    def enter(self) -> list[Step]:
        names = [("state", self.rank, self.block)]
        if self.shape.impatient:
            names += [("poisoned", self.rank, self.block)]
            names += [("abort", self.rank)] if self.v.alive == "rank" else []

        def update(r: Registers, seen: tuple[Any, ...]) -> Registers:
            return r._replace(epoch=seen[0], began=seen[0], failed=any(seen[1:]))

        return [Load(fixed(names), update)]

    def post(self, call: int) -> list[Step]:
        slot, halves, peers = self.slot(call), self.halves(call, "unsent"), self.shape.peers(self.rank)
        sent_as_is = call in self.v.minus_zero and not self.v.sanitise

        def place(q: int, half: int) -> Callable[[Registers], Any]:
            return lambda r: self.words(r, q, self.rank, slot, range(half, half + 1))[0]

        def value(r: Registers) -> Word:
            return (0 if sent_as_is else self.mark(r), call)

        return [Store(place(q, half), value, when=well) for q in peers for half in halves]

    def clear(self, call: int) -> list[Step]:
        slot, first = self.slot(call), 1 if self.v.dirty == "current" else 2
        if not self.v.clear or call < first or slot >= self.shape.lengths[call - first]:
            return []

        def place(q: int, half: int) -> Callable[[Registers], Any]:
            one = range(half, half + 1)
            return lambda r: self.words(r, self.rank, q, slot, one, ahead=self.v.clear)[0]

        peers, halves = self.shape.peers(self.rank), range(self.shape.halves)
        return [Store(place(q, half), fixed(EMPTY), when=well) for q in peers for half in halves]

    def advance(self) -> list[Step]:
        if self.thread:
            return []

        def update(r: Registers, swapped: bool) -> Registers:
            if not swapped:
                raise Fault("overlap")
            return r

        return [Swap(fixed(("state", self.rank, self.block)), lambda r: r.began, lambda r: r.epoch, update, when=well)]

    def arrived(self, r: Registers, words: tuple[Word, ...]) -> bool:
        compare, mark = self.v.compare, self.mark(r)
        if compare == "never":
            return True
        if compare == "reached":
            return all(EPOCHS.arrived(word[0], mark) for word in words)
        if compare == "present":
            return all(word[0] for word in words)
        return all(word[0] == mark for word in (words[:: self.shape.halves] if compare == "first" else words))

    def take(self, call: int) -> list[Step]:
        peers, slot, halves = self.shape.peers(self.rank), self.slot(call), self.halves(call, "unwaited")
        bounded = bool(self.shape.impatient)

        def addresses(r: Registers) -> list[Any]:
            words = [word for q in peers for word in self.words(r, self.rank, q, slot, halves)]
            return [*words, ("abort", self.rank)] if bounded else words

        def split(seen: tuple[Any, ...]) -> tuple[tuple[Word, ...], bool]:
            return (seen[:-1], seen[-1]) if bounded else (seen, False)

        def ready(r: Registers, seen: tuple[Any, ...]) -> bool:
            words, abort = split(seen)
            return self.arrived(r, words) or abort

        def judge(r: Registers, seen: tuple[Any, ...]) -> Registers:
            words, _ = split(seen)
            if not self.arrived(r, words):
                return r._replace(failed=True)
            if any(word[1] != call for word in words):
                raise Fault(f"call {call} takes the data of calls {tuple(word[1] for word in words)}")
            return r

        limit = (lambda r: r._replace(failed=True)) if self.rank in self.shape.impatient else None
        wait = Await(addresses, ready, judge, limit, when=well)
        if not bounded:
            return [wait]
        said = [Store(fixed(("abort", q)), fixed(True), when=ill) for q in range(self.shape.world)]
        return [wait, Write(fixed(("poisoned", self.rank, self.block)), fixed(True), when=ill), *said]

    def program(self) -> Program:
        shape, v, steps = self.shape, self.v, list[Step]()
        meet = Barrier((self.rank, self.block))
        for call in range(1, len(shape.lengths) + 1):
            place, takes_part = (call - 1) % shape.calls_per_launch, self.takes_part(call)
            last = place == shape.calls_per_launch - 1 or call == len(shape.lengths)
            steps += self.enter() if not place else [Drain()] if v.clear and v.fence else []
            used = int(takes_part)
            steps.append(Do(lambda r, used=used: r._replace(epoch=EPOCHS.next(r.epoch), uses=r.uses + used)))
            steps += self.post(call) if takes_part else []
            steps += self.clear(call)
            steps += [meet] if v.barrier != "none" else []
            steps += self.advance() if last else []
            steps += self.take(call) if takes_part and (self.rank, call) not in v.nobody else []
            steps += [meet] if v.barrier == "takes" else []
            steps += [Barrier((self.rank,), drain=True)] if last else []
        return tuple(steps)


def well(r: Registers) -> bool:
    return not r.failed


def ill(r: Registers) -> bool:
    return r.failed


def system(shape: Shape, v: Variant) -> System:
    ranks, blocks, threads = range(shape.world), range(shape.blocks), range(shape.threads)
    memory: dict[Any, Any] = {}
    for r in ranks:
        memory["abort", r] = False
        for b in blocks:
            memory |= {("state", r, b): shape.first_epoch, ("poisoned", r, b): False}
        for buffer in range(v.buffers):
            for q in shape.peers(r):
                for slot in range(shape.blocks * shape.threads):
                    memory |= {("slot", r, buffer, q, slot, half): EMPTY for half in range(shape.halves)}
    waves: dict[Any, Any] = {
        (r, b, t): (Thread(shape, v, r, b, t).program(), Registers()) for r in ranks for b in blocks for t in threads
    }
    return System(waves=waves, memory=memory)
