# SPDX-License-Identifier: Apache-2.0
"""The abstract steps of one flag channel that several operations share, each a launch of one or more calls.

A launch is a list of calls, each with an epoch of its own; the kernel counts them in registers and moves the state on
once, when the last has met. What a call moves:

reduce, gather   its slots to every peer
scatter          its slots to every peer, to each something else
first, second    the two of a two-shot piece of ``length`` units: every rank's slice to that rank, then what it made of
                 it to every peer
meet             nothing: the barriers of a pull
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from .flags import Epochs, Registers, signal, state_word, wait
from .flags import Variant as Flags
from .steps import Barrier, Do, Fault, Load, Program, Step, Store, Swap, System, fixed


class Call(NamedTuple):
    kind: str
    length: int = 1  # slots that a source fills; of "first" and "second": units of the piece


class Launch(NamedTuple):
    calls: tuple[Call, ...]
    blocks: int = 0  # of its grid; 0: the channel's


def one_shot(*pieces: int) -> Launch:
    return Launch(tuple(Call("reduce", length) for length in pieces))


def scatter(*pieces: int) -> Launch:
    return Launch(tuple(Call("scatter", length) for length in pieces))


def two_shot(*pieces: int) -> Launch:
    return Launch(tuple(Call(kind, length) for length in pieces for kind in ("first", "second")))


def pull(barriers: int = 2) -> Launch:
    return Launch((Call("meet", 0),) * barriers)


@dataclass(frozen=True)
class Shape:
    launches: tuple[Launch, ...]
    world: int = 2
    blocks: int = 1
    waves: int = 1
    first_epoch: int = 0
    cumulative: bool = False


@dataclass(frozen=True)
class Variant:
    """The defaults are the protocol; every other value is a fault to find."""

    buffer: str = "epoch"  # or "operation": a count of each kind's calls; or "phase": a two-shot's first and second
    advance: str = "last"  # or "first": the state moves on by one a launch, however many calls it has
    empty: str = "takes part"  # or "leaves": who owns no slice of a piece waits for nobody in it, and takes nothing


def system(shape: Shape, v: Variant) -> System:
    ranks, blocks, waves = range(shape.world), range(shape.blocks), range(shape.waves)
    flags, epochs = Flags(), Epochs()
    calls = [call for launch in shape.launches for call in launch.calls]

    def slots(launch: Launch, length: int, block: int, wave: int) -> range:
        grid = (launch.blocks or shape.blocks) * shape.waves
        return range(block * shape.waves + wave, length, grid)

    def slice_of(rank: int, length: int) -> int:
        each = -(-length // shape.world)
        return max(0, min(each, length - rank * each))

    def sent(call: Call, source: int, to: int) -> int:
        """Slots that ``source`` fills at ``to``."""
        if call.kind in ("first", "second"):
            return slice_of(to if call.kind == "first" else source, call.length)
        return call.length

    def program(rank: int, block: int, wave: int) -> Program:
        peers = [q for q in ranks if q != rank]
        taken = shape.waves - 1 - wave  # another wave's slots, where there is one: the block is the unit
        steps: list[Step] = []
        number = 0
        for launch in shape.launches:
            here = block < (launch.blocks or shape.blocks)
            if here:
                state = [state_word(flags, rank, block)]
                steps.append(Load(fixed(state), lambda r, s: r._replace(epoch=s[0], began=s[0])))
            for call in launch.calls:
                number += 1
                if here:
                    steps += call_steps(launch, call, number, rank, block, wave, taken, peers)
            if here and wave == 0:
                steps.append(advance(rank, block))
            steps.append(Barrier((rank,), drain=True))
        return tuple(steps)

    def call_steps(
        launch: Launch, call: Call, number: int, rank: int, block: int, wave: int, taken: int, peers: list[int]
    ) -> list[Step]:
        kind_count = sum(other.kind == call.kind for other in calls[:number])

        def buffer(r: Registers) -> int:
            if v.buffer == "phase" and call.kind in ("first", "second"):
                return int(call.kind == "second")
            return (kind_count if v.buffer == "operation" else r.epoch) % 2

        def place(owner: int, source: int, slot: int) -> Any:
            return lambda r: ("staging", owner, buffer(r), source, slot)

        def data(to: int) -> Any:
            return (number, to) if call.kind in ("scatter", "first") else number

        def judge(r: Registers, values: tuple[Any, ...]) -> Registers:
            if any(value != data(rank) for value in values):
                raise Fault(f"call {number} takes {values}")
            return r

        mine = [(q, slot) for q in peers for slot in slots(launch, sent(call, rank, q), block, wave)]
        words = [place(rank, q, slot) for q in peers for slot in slots(launch, sent(call, q, rank), block, taken)]
        steps: list[Step] = [Do(lambda r: r._replace(epoch=epochs.next(r.epoch)))]
        steps += [Store(place(q, rank, slot), fixed(data(q))) for q, slot in mine]
        steps += signal(shape, flags, rank, block, wave)  # type: ignore[arg-type]
        leaves = v.empty == "leaves" and call.kind in ("first", "second") and not slice_of(rank, call.length)
        if not leaves:
            steps += wait(shape, flags, rank, block, wave)  # type: ignore[arg-type]
        if words and not leaves:
            steps.append(Load(lambda r: [word(r) for word in words], judge))
        return steps

    def advance(rank: int, block: int) -> Step:
        def update(r: Registers, swapped: bool) -> Registers:
            if not swapped:
                raise Fault("overlap")
            return r

        def to(r: Registers) -> int:
            return r.epoch if v.advance == "last" else epochs.next(r.began)

        return Swap(fixed(state_word(flags, rank, block)), lambda r: r.began, to, update)

    memory: dict[Any, Any] = {}
    most = max([call.length for call in calls])
    for r in ranks:
        memory |= {state_word(flags, r, b): shape.first_epoch for b in blocks}
        memory |= {("pad", r, b, q): shape.first_epoch for b in blocks for q in ranks if q != r}
        memory |= {
            ("staging", r, buffer, q, slot): 0 for buffer in (0, 1) for q in ranks if q != r for slot in range(most)
        }
    return System(
        waves={(r, b, w): (program(r, b, w), Registers()) for r in ranks for b in blocks for w in waves},
        memory=memory,
        cumulative=shape.cumulative,
    )
