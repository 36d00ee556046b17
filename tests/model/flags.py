# SPDX-License-Identifier: Apache-2.0
"""The abstract steps of the one-shot all-reduce with flags, and of every wrong variant that the checker must find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .steps import Await, Barrier, Do, Drain, Fault, Fence, Load, Program, Step, Store, Swap, System, fixed


class Registers(NamedTuple):
    epoch: int = 0  # e of the call at hand; before the first, of the call before it
    began: int = 0  # the epoch read at entry


@dataclass(frozen=True)
class Epochs:
    """Epochs 1 … ``last`` in words of ``bits`` bits: the real ones are 32 bits and 2**32 - 4."""

    bits: int = 4
    last: int = 12

    def next(self, e: int) -> int:
        return 1 if e == self.last else e + 1

    def arrived(self, seen: int, e: int) -> bool:
        return (seen - e) % 2**self.bits < 2 ** (self.bits - 1)

    def in_step(self, seen: int, e: int) -> bool:
        return seen in (e, self.next(e))

    def in_step_raw(self, seen: int, e: int) -> bool:
        """Wrong: the cycle is shorter than the word's, so one call ahead is not always a difference of 1."""
        return (seen - e) % 2**self.bits in (0, 1)


@dataclass(frozen=True)
class Shape:
    world: int = 2
    blocks: int = 1
    waves: int = 1
    calls: int = 3
    calls_per_launch: int = 1
    first_epoch: int = 0  # the epoch before the first call, in the state and in every pad
    cumulative: bool = False  # the machine: see steps.py
    early_loads: bool = False


@dataclass(frozen=True)
class Variant:
    """The defaults are the protocol; every other value is a fault to find."""

    buffers: int = 2
    wait: str = "signed"  # or "equal", "never"
    state: str = "block"  # or "channel": one epoch word, advanced by block 0
    wave_wait: bool = True  # each wave waits for its own stores before the barrier of `arrive`
    release: bool = True
    acquire: bool = True
    take_barrier: bool = True  # the block barrier between the wait and the take
    arrive_barrier: bool = True
    only_send: frozenset[int] = frozenset()  # ranks that wait for nothing and take nothing
    begin: str = (
        "launch"  # or "call": every call of a launch reads the state again, thread 0 writes it after every call
    )
    finish_barrier: bool = False  # a block barrier after thread 0 wrote the state: "call" needs it
    parity: str = "epoch"  # or "launch": a count of launches, where a launch has several calls
    in_step: str = "calls"  # or "raw": the difference of the words
    epochs: Epochs = Epochs()


def peers(shape: Shape, rank: int) -> list[int]:
    return [q for q in range(shape.world) if q != rank]


def signal(shape: Shape, v: Variant, rank: int, block: int, wave: int) -> list[Step]:
    """Rule 8: each wave waits for its own stores, the block meets, one thread a peer (wave 0) stores the epoch."""
    steps: list[Step] = []
    if v.wave_wait:
        steps.append(Drain())
    if v.arrive_barrier:
        steps.append(Barrier((rank, block)))
    if wave == 0:
        steps += [
            Store(fixed(("pad", q, block, rank)), lambda r: r.epoch, release=v.release) for q in peers(shape, rank)
        ]
    return steps


def wait(shape: Shape, v: Variant, rank: int, block: int, wave: int) -> list[Step]:
    """Rule 5, and one acquire fence after success; then the block meets."""
    steps: list[Step] = []
    if wave == 0 and rank not in v.only_send and v.wait != "never":
        in_step = v.epochs.in_step_raw if v.in_step == "raw" else v.epochs.in_step

        def ready(r: Registers, seen: tuple[int, ...]) -> bool:
            return all(s == r.epoch if v.wait == "equal" else v.epochs.arrived(s, r.epoch) for s in seen)

        def update(r: Registers, seen: tuple[int, ...]) -> Registers:
            for s in seen:
                if not in_step(s, r.epoch):
                    raise Fault(f"desync: at call {r.epoch}, seen {s}")
            return r

        steps.append(Await(fixed([("pad", rank, block, q) for q in peers(shape, rank)]), ready, update))
        if v.acquire:
            steps.append(Fence())
    if v.take_barrier:
        steps.append(Barrier((rank, block)))
    return steps


def begin(v: Variant, rank: int, block: int) -> Step:
    return Load(fixed([state_word(v, rank, block)]), lambda r, values: r._replace(epoch=values[0], began=values[0]))


def finish(v: Variant, rank: int, block: int, wave: int) -> list[Step]:
    """Thread 0 moves the state on. Every wave read it before the barrier of ``arrive``: no other is needed here."""
    if wave != 0 or (v.state == "channel" and block != 0):
        return [Barrier((rank, block))] if v.finish_barrier else []

    def update(r: Registers, swapped: bool) -> Registers:
        if not swapped:
            raise Fault("overlap")
        return r

    swap = Swap(fixed(state_word(v, rank, block)), lambda r: r.began, lambda r: r.epoch, update)
    return [swap, Barrier((rank, block))] if v.finish_barrier else [swap]


def state_word(v: Variant, rank: int, block: int) -> Any:
    return ("state", rank, block if v.state == "block" else 0)


def one_shot(shape: Shape, v: Variant, rank: int, block: int, wave: int) -> Program:
    """All calls of one wave. It posts its own fragment; it takes that of another wave of the block, where there is
    one: the block is the unit of the protocol."""

    def slot(launch: int, owner: int, source: int, wave: int) -> Callable[[Registers], Any]:
        def address(r: Registers) -> Any:
            return ("staging", owner, block, (r.epoch if v.parity == "epoch" else launch) % v.buffers, source, wave)

        return address

    def together(addresses: list[Callable[[Registers], Any]]) -> Callable[[Registers], Any]:
        return lambda r: [address(r) for address in addresses]

    others, taken = peers(shape, rank), shape.waves - 1 - wave
    steps: list[Step] = []
    for call in range(1, shape.calls + 1):
        launch, place = divmod(call - 1, shape.calls_per_launch)
        last = place == shape.calls_per_launch - 1 or call == shape.calls
        if place == 0 or v.begin == "call":
            steps.append(begin(v, rank, block))
        steps.append(Do(lambda r: r._replace(epoch=v.epochs.next(r.epoch))))
        steps += [Store(slot(launch, q, rank, wave), fixed(call)) for q in others]
        steps += signal(shape, v, rank, block, wave) + wait(shape, v, rank, block, wave)
        if rank not in v.only_send:
            steps.append(Load(together([slot(launch, rank, q, taken) for q in others]), expect(call)))
        if last or v.begin == "call":
            steps += finish(v, rank, block, wave)
        if last:
            steps.append(Barrier((rank,), drain=True))
    return tuple(steps)


def expect(call: int) -> Callable[[Registers, tuple[int, ...]], Registers]:
    def update(r: Registers, values: tuple[int, ...]) -> Registers:
        if any(value != call for value in values):
            raise Fault(f"call {call} takes the data of calls {values}")
        return r

    return update


def system(shape: Shape, v: Variant, program: Callable[..., Program] = one_shot) -> System:
    ranks, blocks, waves = range(shape.world), range(shape.blocks), range(shape.waves)
    memory: dict[Any, int] = {}
    for r in ranks:
        for b in blocks:
            memory[state_word(v, r, b)] = shape.first_epoch
            memory |= {("pad", r, b, q): shape.first_epoch for q in ranks if q != r}
            memory |= {("entered", r, b, w): 0 for w in waves}
            memory |= {
                ("staging", r, b, slot, q, w): 0 for q in ranks if q != r for w in waves for slot in range(v.buffers)
            }
    early = {
        (r, b): tuple(address for address in memory if address[:3] == ("staging", r, b)) for r in ranks for b in blocks
    }
    return System(
        waves={(r, b, w): (program(shape, v, r, b, w), Registers()) for r in ranks for b in blocks for w in waves},
        memory=memory,
        cumulative=shape.cumulative,
        early=early if shape.early_loads else {},
    )
