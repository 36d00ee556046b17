# SPDX-License-Identifier: Apache-2.0
"""The abstract steps of an all-reduce that reads its peers' memory where it lies (pull), and what may go wrong in it.

Every call of a rank is three kernels: one of anybody's writes the rank's input; the pull; and one of anybody's writes
the input again at once, which the next call's first kernel does. Blocks are of one wave. Slot s of an input is block
s % blocks's; in place, the slots of a block are pieces, with a barrier each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from .flags import Epochs
from .steps import Await, Barrier, Do, Drain, Fault, Fence, Load, Program, Step, Store, System, fixed

EPOCHS = Epochs()


class Registers(NamedTuple):
    epoch: int = 0
    ok: bool = True  # of the call at hand and, later, of the channel
    fresh: bool = False  # it has just failed
    gone: bool = False  # a peer had given up after the reads
    wrong: tuple[int, ...] = ()  # what was read in place of this call's input


def well(r: Registers) -> bool:
    return r.ok


@dataclass(frozen=True)
class Shape:
    world: int = 2
    blocks: int = 1
    pieces: int = 1
    calls: int = 2
    in_place: bool = False
    first_epoch: int = 0
    early_loads: bool = False
    limit: frozenset[tuple[int, int]] = frozenset()  # (rank, call) whose waits may give up at any time

    def peers(self, rank: int) -> list[int]:
        return [q for q in range(self.world) if q != rank]


@dataclass(frozen=True)
class Variant:
    """The defaults are the protocol; every other value is a fault to find."""

    entry: bool = True
    trailing: bool = True  # in place: the barrier of every piece
    write: str = "after"  # in place, its barrier, if that holds; or "before" it, or after it "anyway"
    paired: bool = True  # a block reads what the same block of the peers writes in place; or another one does
    look: bool = True  # after the reads: whether a peer has given up
    acquire: bool = True


def system(shape: Shape, v: Variant) -> System:
    slots = range(shape.blocks * shape.pieces)

    def meet(rank: int, block: int, call: int, after_reads: bool) -> list[Step]:
        peers = shape.peers(rank)
        words = [("pad", rank, block, q) for q in peers] + [("abort", rank)]

        def come(r: Registers, seen: tuple[int, ...]) -> bool:
            return all(EPOCHS.arrived(s, r.epoch) for s in seen[:-1])

        def ready(r: Registers, seen: tuple[int, ...]) -> bool:
            return come(r, seen) or bool(seen[-1])

        def judge(r: Registers, seen: tuple[int, ...]) -> Registers:
            ok = come(r, seen) and all(EPOCHS.in_step(s, r.epoch) for s in seen[:-1]) and not r.gone
            return r._replace(ok=ok, fresh=not ok)

        def expired(r: Registers) -> Registers:
            return r._replace(ok=False, fresh=True)

        steps: list[Step] = [Do(lambda r: r._replace(epoch=EPOCHS.next(r.epoch), fresh=False)), Drain()]
        steps += [Store(fixed(("pad", q, block, rank)), lambda r: r.epoch, release=True, when=well) for q in peers]
        if shape.limit and after_reads and v.look:
            steps.append(Load(fixed([("abort", rank)]), lambda r, seen: r._replace(gone=bool(seen[0])), when=well))
        limit = expired if (rank, call) in shape.limit else None
        steps.append(Await(fixed(words), ready, judge, limit, when=well))
        if v.acquire:
            steps.append(Fence())
        if shape.limit:
            steps += [Store(fixed(("abort", q)), fixed(1), when=lambda r: r.fresh) for q in range(shape.world)]
        return steps

    def read(rank: int, call: int, slot: int) -> Step:
        def note(r: Registers, found: tuple[int, ...]) -> Registers:
            return r._replace(wrong=(*r.wrong, *(of for of in found if of != call)))

        return Load(fixed([("input", q, slot) for q in shape.peers(rank)]), note, when=well)

    def judge(call: int) -> Step:
        def update(r: Registers) -> Registers:
            if r.ok and r.wrong:
                raise Fault(f"call {call} succeeds with the inputs of calls {r.wrong}")
            return r._replace(wrong=())

        return Do(update)

    def kernel(rank: int, block: int, call: int) -> list[Step]:
        steps = meet(rank, block, call, after_reads=False) if v.entry else []
        mine = [slot for slot in slots if slot % shape.blocks == block]
        for slot in mine:
            shift = 0 if v.paired else 1
            steps.append(read(rank, call, slot - block + (block + shift) % shape.blocks))
            if shape.in_place:
                result = Store(fixed(("input", rank, slot)), fixed(-call), when=lambda r: r.ok or v.write == "anyway")
                steps += [result] if v.write == "before" else []
                steps += meet(rank, block, call, after_reads=True) if v.trailing else []
                steps += [result] if v.write != "before" else []
        if not shape.in_place and v.trailing:
            steps += meet(rank, block, call, after_reads=True)
        return [*steps, judge(call)]

    def program(rank: int, block: int) -> Program:
        end = Barrier((rank,), drain=True)
        written = [slot for slot in slots if slot % shape.blocks == (block + 1) % shape.blocks]
        steps: list[Step] = []
        for call in range(1, shape.calls + 1):
            steps += [*(Store(fixed(("input", rank, slot)), fixed(call)) for slot in written), end]
            steps += [*kernel(rank, block, call), end]
        return (*steps, *(Store(fixed(("input", rank, slot)), fixed(0)) for slot in written), end)

    ranks, blocks = range(shape.world), range(shape.blocks)
    memory: dict[Any, Any] = {("abort", r): 0 for r in ranks} | {("input", r, slot): 0 for r in ranks for slot in slots}
    memory |= {("pad", r, b, q): shape.first_epoch for r in ranks for b in blocks for q in shape.peers(r)}
    early = {(r, b): tuple(("input", q, s) for q in shape.peers(r) for s in slots) for r in ranks for b in blocks}
    return System(
        waves={(r, b, 0): (program(r, b), Registers(epoch=shape.first_epoch)) for r in ranks for b in blocks},
        memory=memory,
        early=early if shape.early_loads else {},
    )
