# SPDX-License-Identifier: Apache-2.0
"""The abstract steps of the two-shot all-reduce: push slice r to rank r, which pushes the sum to everybody.

A message is ``units`` units long; slice r is the ``ceil(units / P)`` of them from r times that on, so several may be
empty. Unit i of every slice is wave i's. Staging is one buffer a phase: in the first with a place for each source, in
the second with one for each owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .flags import Epochs, Registers, expect
from .steps import Await, Barrier, Do, Drain, Fault, Fence, Load, Program, Step, Store, System, fixed

EPOCHS = Epochs()


@dataclass(frozen=True)
class Shape:
    world: int = 2
    waves: int = 1  # of the one block, where a call has flags; the grid, of blocks of their own, where it has packets
    units: tuple[int, ...] = (2, 1, 2)  # call by call
    packets: bool = False
    first_epoch: int = 0

    def slice(self, rank: int, call: int) -> int:
        """Its length."""
        units = self.units[call - 1]
        size = -(-units // self.world)
        return max(0, min(size, units - rank * size))

    def peers(self, rank: int) -> list[int]:
        return [q for q in range(self.world) if q != rank]


@dataclass(frozen=True)
class Variant:
    """The defaults are the protocol; every other value is a fault to find."""

    one_buffer: bool = False  # for both phases
    one_epoch: bool = False  # for both signals of a call, in one word
    two_words: bool = False  # a signal word for each phase: right as well
    empty_owner: str = "takes part"  # or "leaves": waits for nothing; or "is mute": signals no second time


@dataclass(frozen=True)
class Wave:
    """Of rank ``rank``: the steps of one wave."""

    shape: Shape
    v: Variant
    rank: int
    wave: int

    def place(self, owner: int, phase: int, source: int, unit: int) -> Any:
        return ("slot", owner, 1 if self.v.one_buffer else phase, source, unit)

    def leaves(self, call: int) -> bool:
        return self.v.empty_owner == "leaves" and not self.shape.slice(self.rank, call)

    # ---- flags: every phase is a step of its own, with an epoch of its own

    def meet(self, call: int, phase: int) -> list[Step]:
        v, rank, peers = self.v, self.rank, self.shape.peers(self.rank)
        word = phase if v.two_words else 1

        def ready(r: Registers, seen: tuple[int, ...]) -> bool:
            return all(EPOCHS.arrived(s, r.epoch) for s in seen)

        steps: list[Step] = []
        if phase == 1 or not (v.one_epoch or v.two_words):
            steps.append(Do(lambda r: r._replace(epoch=EPOCHS.next(r.epoch))))
        steps += [Drain(), Barrier((rank,))]
        if self.wave == 0:
            mute = v.empty_owner == "is mute" and phase == 2 and not self.shape.slice(rank, call)
            to = [] if mute else peers
            steps += [Store(fixed(("pad", q, word, rank)), lambda r: r.epoch, release=True) for q in to]
            if not self.leaves(call):
                steps += [Await(fixed([("pad", rank, word, q) for q in peers]), ready), Fence()]
        return [*steps, Barrier((rank,))]

    def flags(self) -> Program:
        """A wave takes another wave's units, where there is one: the block is the unit of the protocol."""
        shape, rank, mine = self.shape, self.rank, self.wave
        other = shape.waves - 1 - mine
        steps: list[Step] = []
        for call in range(1, len(shape.units) + 1):
            length = [shape.slice(q, call) for q in range(shape.world)]
            peers = shape.peers(rank)
            steps += [Store(fixed(self.place(q, 1, rank, mine)), fixed(call)) for q in peers if mine < length[q]]
            steps += self.meet(call, 1)
            if other < length[rank]:
                steps.append(Load(fixed([self.place(rank, 1, q, other) for q in peers]), expect(call)))
                steps += [Store(fixed(self.place(q, 2, rank, other)), fixed(call)) for q in peers]
            steps += self.meet(call, 2)
            taken = [self.place(rank, 2, q, mine) for q in peers if mine < length[q]]
            if taken and not self.leaves(call):
                steps.append(Load(fixed(taken), expect(call)))
            steps.append(Barrier((rank,), drain=True))
        return tuple(steps)

    # ---- packets: a word is (epoch, call); who has no unit sends nothing and waits for nothing

    def poll(self, call: int, words: list[Any]) -> list[Step]:
        def ready(r: Registers, seen: tuple[Any, ...]) -> bool:
            return all(tag == r.epoch for tag, _ in seen)

        def judge(r: Registers, seen: tuple[Any, ...]) -> Registers:
            found = tuple(of for _, of in seen)
            if any(of != call for of in found):
                raise Fault(f"call {call} takes the data of calls {found}")
            return r

        return [Await(fixed(words), ready, judge)] if words else []

    def packets(self) -> Program:
        shape, rank, unit = self.shape, self.rank, self.wave
        steps: list[Step] = []
        for call in range(1, len(shape.units) + 1):
            owners = [q for q in shape.peers(rank) if unit < shape.slice(q, call)]
            mine = unit < shape.slice(rank, call)

            def push(q: int, phase: int, call: int = call) -> Step:
                return Store(fixed(self.place(q, phase, rank, unit)), lambda r: (r.epoch, call))

            steps.append(Do(lambda r: r._replace(epoch=EPOCHS.next(r.epoch))))
            steps += [push(q, 1) for q in owners]
            if mine:
                steps += self.poll(call, [self.place(rank, 1, q, unit) for q in shape.peers(rank)])
                steps += [push(q, 2) for q in shape.peers(rank)]
            if not self.leaves(call):
                steps += self.poll(call, [self.place(rank, 2, q, unit) for q in owners])
            steps.append(Barrier((rank,), drain=True))
        return tuple(steps)


def system(shape: Shape, v: Variant) -> System:
    ranks, waves = range(shape.world), range(shape.waves)
    memory: dict[Any, Any] = {}
    for r in ranks:
        for q in shape.peers(r):
            for phase in (1, 2):
                memory["pad", r, phase, q] = shape.first_epoch
                memory |= {("slot", r, phase, q, unit): (0, 0) if shape.packets else 0 for unit in waves}
    programs: dict[Any, Any] = {}
    for r in ranks:
        for w in waves:
            one = Wave(shape, v, r, w)
            name = (r, w, 0) if shape.packets else (r, 0, w)
            programs[name] = (one.packets() if shape.packets else one.flags(), Registers(epoch=shape.first_epoch))
    return System(waves=programs, memory=memory)
