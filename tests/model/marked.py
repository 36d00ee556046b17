# SPDX-License-Identifier: Apache-2.0
"""The abstract steps of the one-shot all-reduce whose data carries its own mark: packets (a tag) and sentinels.

No flag and no fence: a thread posts its slot to every peer, and polls its own until all marks are there. Slot t is
thread t's of the grid; in a call that is shorter it carries nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .flags import Epochs
from .steps import Await, Barrier, Do, Drain, Fault, Load, Program, Step, Store, Swap, System, Write, fixed

# (mark, the call whose data it is, in a scatter with where it goes); mark 0: the word of a slot that nobody has filled
Word = tuple[int, Any]
EMPTY: Word = (0, 0)
EPOCHS = Epochs()


class Registers(NamedTuple):
    epoch: int = 0
    began: int = 0  # the epoch read at entry
    uses: int = 0  # of this thread's slot
    failed: bool = False  # in a wait of this launch
    silent: bool = False  # because of an earlier launch: posts, clears and takes nothing


@dataclass(frozen=True)
class Shape:
    world: int = 2
    blocks: int = 2
    threads: int = 1  # a block
    lengths: tuple[int, ...] = (2, 1, 1, 2)  # slots with data, call by call
    scatters: frozenset[int] = frozenset()  # calls that send something else to each peer; the others, alike to all
    calls_per_launch: int = 1
    halves: int = 1  # words in a slot
    partial: frozenset[int] = frozenset()  # calls whose last word is padding
    first_epoch: int = 0
    limit: frozenset[tuple[int, int]] = frozenset()  # (rank, call) whose waits may give up at any time

    def peers(self, rank: int) -> list[int]:
        return [q for q in range(self.world) if q != rank]

    def epoch(self, call: int) -> int:
        e = self.first_epoch
        for _ in range(call):
            e = EPOCHS.next(e)
        return e


@dataclass(frozen=True)
class Variant:
    """The defaults are the packets, with what :data:`SENTINEL` says the sentinels; other values are faults to find, or
    what cures one."""

    buffers: int = 2
    compare: str = "equal"  # or "reached", "first" (of a slot's words), "present" (sentinels), "never"
    tag_bits: int = 0  # of the tag, if it is narrower than the epoch
    nobody: frozenset[tuple[int, int]] = frozenset()  # (rank, call) in which a rank waits for nobody
    padding: str = "waited"  # or "unsent", "unwaited"
    idle: str = "rests"  # or "empty": a thread without data posts and waits all the same
    refresh: int = 0  # it does so in calls whose epoch modulo this is 0 or 1
    counts: str = "calls"  # or "uses": buffer and tag count the uses of the slot
    barrier: str = "posts"  # of the block, after every call's posts; or "takes": one more, after its takes; or "none"
    moves: bool = False  # from the second call on, slot t is the next thread's
    # later launches are silent: of the rank, if one of its waits has failed; of the "block", if one of its waits has;
    # or of the rank, if it has failed or has been sent "abort"
    silent: str = "rank"

    clear: int = 0  # sentinels: how many buffers further the one to clear lies
    # the call whose length says how much: the "previous" one; or the "current"; or the previous of the same "operation"
    dirty: str = "previous"
    uneven: frozenset[tuple[int, int]] = frozenset()  # (rank, scatter) in which the rank gets nothing
    sanitise: bool = True
    minus_zero: frozenset[int] = frozenset()  # calls whose data is the sentinel itself
    fence: bool = True  # between a clear and the same thread's next post, where no kernel ends between them


SENTINEL = Variant(buffers=3, compare="present", clear=2)


@dataclass(frozen=True)
class Thread:
    """Of rank ``rank``: the steps of one thread."""

    shape: Shape
    v: Variant
    rank: int
    block: int
    thread: int

    def slot(self, call: int) -> int:
        grid = self.shape.blocks * self.shape.threads
        return (self.block * self.shape.threads + self.thread + (self.v.moves and call > 1)) % grid

    def used(self, slot: int, call: int) -> bool:
        refresh = bool(self.v.refresh) and self.shape.epoch(call) % self.v.refresh < 2
        return self.v.idle == "empty" or refresh or slot < self.shape.lengths[call - 1]

    def halves(self, call: int, without_padding: str) -> range:
        padded = call in self.shape.partial and self.slot(call) == self.shape.lengths[call - 1] - 1
        return range(self.shape.halves - (padded and self.v.padding == without_padding))

    def mark(self, r: Registers) -> int:
        if self.v.compare == "present":
            return 1
        count = r.uses if self.v.counts == "uses" else r.epoch
        return count % 2**self.v.tag_bits if self.v.tag_bits else count

    def word(self, owner: int, source: int, slot: int, half: int, ahead: int = 0) -> Callable[[Registers], Any]:
        def address(r: Registers) -> Any:
            count = r.uses if self.v.counts == "uses" else r.epoch
            return ("slot", owner, (count + ahead) % self.v.buffers, source, slot, half)

        return address

    # ---- the parts of a call

    def enter(self) -> list[Step]:
        steps: list[Step] = []
        if self.shape.limit:
            words = [("gave up", self.rank, self.block) if self.v.silent == "block" else ("gave up", self.rank)]
            words += [("abort", self.rank)] if self.v.silent == "abort" else []
            steps.append(Load(fixed(words), lambda r, seen: r._replace(failed=False, silent=any(seen))))
        if self.shape.threads > 1:  # else nobody else sees the state
            steps.append(Load(fixed([self.state()]), lambda r, seen: r._replace(epoch=seen[0], began=seen[0])))
        return steps

    def state(self) -> Any:
        return ("state", self.rank, self.block)

    def post(self, call: int) -> list[Step]:
        as_is = call in self.v.minus_zero and not self.v.sanitise
        return [
            Store(
                self.word(q, self.rank, self.slot(call), half),
                lambda r, q=q: (0 if as_is else self.mark(r), self.data(call, q)),
                when=well,
            )
            for q in self.shape.peers(self.rank)
            if (q, call) not in self.v.uneven
            for half in self.halves(call, "unsent")
        ]

    def data(self, call: int, to: int) -> Any:
        return (call, to) if call in self.shape.scatters else call

    def clear(self, call: int) -> list[Step]:
        dirty = call - (self.v.dirty != "current")
        if self.v.dirty == "operation":
            alike = call in self.shape.scatters
            dirty = next((c for c in range(call - 1, 0, -1) if (c in self.shape.scatters) == alike), 0)
        if not self.v.clear or dirty < 1 or not self.used(self.slot(call), dirty):
            return []
        return [
            Store(self.word(self.rank, q, self.slot(call), half, ahead=self.v.clear), fixed(EMPTY), when=well)
            for q in self.shape.peers(self.rank)
            for half in range(self.shape.halves)
        ]

    def advance(self) -> list[Step]:
        if self.thread or self.shape.threads == 1:
            return []

        def update(r: Registers, swapped: bool) -> Registers:
            if not swapped:
                raise Fault("overlap")
            return r

        return [Swap(fixed(self.state()), lambda r: r.began, lambda r: r.epoch, update, when=well)]

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
        halves = self.halves(call, "unwaited")
        words = [self.word(self.rank, q, self.slot(call), half) for q in self.shape.peers(self.rank) for half in halves]
        aborted = [("abort", self.rank)] if self.shape.limit else []

        def addresses(r: Registers) -> list[Any]:
            return [*(word(r) for word in words), *aborted]

        def ready(r: Registers, seen: tuple[Any, ...]) -> bool:
            return self.arrived(r, seen[: len(words)]) or any(seen[len(words) :])

        def judge(r: Registers, seen: tuple[Any, ...]) -> Registers:
            if not self.arrived(r, seen[: len(words)]):
                return r._replace(failed=True)
            found = tuple(of for _, of in seen[: len(words)])
            if any(of != self.data(call, self.rank) for of in found):
                raise Fault(f"call {call} takes the data of calls {found}")
            return r

        limit = (lambda r: r._replace(failed=True)) if (self.rank, call) in self.shape.limit else None
        return [Await(addresses, ready, judge, limit, when=well)]

    def give_up(self) -> list[Step]:
        """Rule 10: the record, the marks, and abort to everybody. ``no sum``: a ghost word."""
        words = [("gave up", self.rank), ("gave up", self.rank, self.block)]
        said: list[Step] = [Write(fixed(word), fixed(True), when=lambda r: r.failed) for word in words]
        if self.v.silent == "abort":
            said.append(Write(fixed(("no sum", self.rank)), fixed(True), when=lambda r: r.silent))
        to = range(self.shape.world)
        return [*said, *(Store(fixed(("abort", q)), fixed(True), when=lambda r: r.failed) for q in to)]

    def program(self) -> Program:
        shape, v, steps = self.shape, self.v, list[Step]()
        meet = Barrier((self.rank, self.block))
        for call in range(1, len(shape.lengths) + 1):
            place, takes_part = (call - 1) % shape.calls_per_launch, self.used(self.slot(call), call)
            last = place == shape.calls_per_launch - 1 or call == len(shape.lengths)
            if place == 0:
                steps += self.enter()
            elif v.clear and v.fence:
                steps.append(Drain())
            steps.append(Do(count_call if takes_part else skip_call))
            steps += self.post(call) if takes_part else []
            steps += self.clear(call)
            steps += [meet] if v.barrier != "none" else []
            steps += self.advance() if last else []
            if takes_part and (self.rank, call) not in v.nobody | v.uneven:
                steps += self.take(call)
                steps += self.give_up() if shape.limit else []
            steps += [meet] if v.barrier == "takes" else []
            steps += [Barrier((self.rank,), drain=True)] if last else []
        return tuple(steps)


def skip_call(r: Registers) -> Registers:
    return r._replace(epoch=EPOCHS.next(r.epoch))


def count_call(r: Registers) -> Registers:
    return r._replace(epoch=EPOCHS.next(r.epoch), uses=r.uses + 1)


def well(r: Registers) -> bool:
    return not r.failed and not r.silent


def system(shape: Shape, v: Variant) -> System:
    ranks, blocks, threads = range(shape.world), range(shape.blocks), range(shape.threads)
    memory: dict[Any, Any] = {}
    for r in ranks:
        memory |= {("abort", r): False, ("gave up", r): False, ("no sum", r): False}
        memory |= {("gave up", r, b): False for b in blocks} | {("state", r, b): shape.first_epoch for b in blocks}
        slots = [(q, slot) for q in shape.peers(r) for slot in range(shape.blocks * shape.threads)]
        for buffer in range(v.buffers):
            memory |= {("slot", r, buffer, *slot, half): EMPTY for slot in slots for half in range(shape.halves)}
    start = Registers(epoch=shape.first_epoch)
    waves: dict[Any, Any] = {
        (r, b, t): (Thread(shape, v, r, b, t).program(), start) for r in ranks for b in blocks for t in threads
    }

    def final(end: dict[Any, Any]) -> None:
        for r in ranks:
            if end["no sum", r] and not end["gave up", r]:
                raise Fault(f"rank {r} has no sum and no record says so")

    return System(waves=waves, memory=memory, final=final)
