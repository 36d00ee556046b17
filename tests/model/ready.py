# SPDX-License-Identifier: Apache-2.0
"""The abstract steps of ready marks: the blocks of one grid make tiles, mark them and read each other's, call by call.

In a call every block stores its tile, marks it, waits for the marks of the other blocks and reads their tiles. A launch
has one call or several (layers, which take the tiles' buffers in turn). A mark is a word of its block.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import eq
from typing import Any, NamedTuple

from .flags import Epochs
from .steps import Await, Barrier, Do, Drain, Fault, Fence, Load, Program, Step, Store, System, fixed

EPOCHS = Epochs()
COMPARE = {"in step": EPOCHS.in_step, "equal": eq, "arrived": EPOCHS.arrived}


class Registers(NamedTuple):
    epoch: int = 0
    made: int = 0  # tiles that this block has marked


@dataclass(frozen=True)
class Shape:
    blocks: int = 2
    waves: int = 1
    calls: int = 3
    calls_per_launch: int = 1
    first_epoch: int = 0  # the epoch before the first call
    marks: int | None = None  # what every mark holds before it; None: that epoch
    rests: frozenset[tuple[int, int]] = frozenset()  # (block, call): makes no tile, and nobody waits for one
    cumulative: bool = False  # the machine: see steps.py
    early_loads: bool = False


@dataclass(frozen=True)
class Variant:
    """The defaults are the protocol; every other value is a fault to find."""

    buffers: int = 2
    wave_wait: bool = True  # each wave waits for its own stores before the barrier of `mark`
    mark_barrier: bool = True
    release: bool = True
    compare: str = "in step"  # or "equal", "arrived"
    reset: str = "never"  # or "start": block 0 zeroes all marks as a launch begins; "waited": what was waited for
    holds: str = "epoch"  # or "count": how often it was marked, as a counter would that marks are added to
    acquire: bool = True
    read_barrier: bool = True  # the block barrier between the wait and the reads
    only_mark: frozenset[int] = frozenset()  # blocks that wait for nothing


def block_program(shape: Shape, v: Variant, block: int, wave: int) -> Program:
    """All calls of one wave. It reads the tile parts of another wave, where there is one."""
    taken = shape.waves - 1 - wave
    steps: list[Step] = []
    for call in range(1, shape.calls + 1):
        place = (call - 1) % shape.calls_per_launch
        if place == 0 and v.reset == "start" and (block, wave) == (0, 0):
            steps += [Store(fixed(("mark", b)), fixed(0)) for b in range(shape.blocks)]
        steps.append(Do(lambda r: r._replace(epoch=EPOCHS.next(r.epoch))))
        if (block, call) not in shape.rests:
            steps += _make(v, call, block, wave)
        others = [b for b in range(shape.blocks) if b != block and (b, call) not in shape.rests]
        if block not in v.only_mark:
            steps += _read(v, call, block, wave, others, taken)
        if place == shape.calls_per_launch - 1 or call == shape.calls:
            steps.append(Barrier((0,), drain=True))
    return tuple(steps)


def _make(v: Variant, call: int, block: int, wave: int) -> list[Step]:
    bits = 2**EPOCHS.bits
    steps: list[Step] = [
        Store(lambda r: ("tile", r.epoch % v.buffers, block, wave), fixed(call)),
        Do(lambda r: r._replace(made=(r.made + 1) % bits)),
    ]
    if v.wave_wait:
        steps.append(Drain())
    if v.mark_barrier:
        steps.append(Barrier((0, block)))
    if wave == 0:
        value = (lambda r: r.epoch) if v.holds == "epoch" else (lambda r: r.made)
        steps.append(Store(fixed(("mark", block)), value, release=v.release))
    return steps


def _read(v: Variant, call: int, block: int, wave: int, others: list[int], taken: int) -> list[Step]:
    def ready(r: Registers, seen: tuple[int, ...]) -> bool:
        return all(COMPARE[v.compare](s, r.epoch) for s in seen)

    def expect(r: Registers, values: tuple[int, ...]) -> Registers:
        if any(value != call for value in values):
            raise Fault(f"call {call} reads tiles of calls {values}")
        return r

    steps: list[Step] = []
    if wave == 0 and others:
        steps.append(Await(fixed([("mark", b) for b in others]), ready))
        if v.acquire:
            steps.append(Fence())
        if v.reset == "waited":
            steps += [Store(fixed(("mark", b)), fixed(0)) for b in others]
    if v.read_barrier:
        steps.append(Barrier((0, block)))
    steps.append(Load(lambda r: [("tile", r.epoch % v.buffers, b, taken) for b in others], expect))
    return steps


def system(shape: Shape, v: Variant) -> System:
    blocks, waves = range(shape.blocks), range(shape.waves)
    held = shape.first_epoch if shape.marks is None else shape.marks
    memory: dict[Any, int] = {("mark", b): held for b in blocks}
    memory |= {("tile", slot, b, w): 0 for slot in range(v.buffers) for b in blocks for w in waves}
    tiles = tuple(address for address in memory if address[0] == "tile")
    start = Registers(epoch=shape.first_epoch, made=shape.first_epoch)
    return System(
        waves={(0, b, w): (block_program(shape, v, b, w), start) for b in blocks for w in waves},
        memory=memory,
        cumulative=shape.cumulative,
        early={(0, b): tiles for b in blocks} if shape.early_loads else {},
    )
