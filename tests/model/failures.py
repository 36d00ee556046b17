# SPDX-License-Identifier: Apache-2.0
"""Bounded waits: what the one-shot does when a peer does not come, comes late, or is at another call (rule 10).

A launch is one call, or several: pieces. A rank's pad has, per block and peer, a signal word (epoch, hash), and one
abort word. The state of a block (epoch, poisoned) is kept in registers, because nobody else touches it; the faulty case
where somebody does has a word for it. A block of several waves agrees on a failure through ``failed``, a word of its
shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .flags import Epochs
from .steps import Await, Barrier, Do, Drain, Fault, Fence, Load, Program, Step, Store, System, Write, always, fixed

EPOCHS = Epochs()


class Registers(NamedTuple):
    epoch: int = 0
    failed: bool = False  # in the call at hand, or the channel is poisoned
    limits: int = 0  # how many time limits this wave has waited out


def well(r: Registers) -> bool:
    return not r.failed


def ill(r: Registers) -> bool:
    return r.failed


@dataclass(frozen=True)
class Case:
    """The defaults of the second half are the protocol; every other value there is a fault to find."""

    world: int = 2
    blocks: int = 1
    waves: int = 1
    calls: int = 2
    calls_per_launch: int = 1
    absent: frozenset[int] = frozenset()  # ranks that never launch
    host_abort: bool = False  # their hosts send abort
    idle: frozenset[tuple[int, int]] = frozenset()  # (rank, block) of blocks that never get to their first step
    patient: frozenset[int] = frozenset()  # ranks whose waits have no limit
    hashes: tuple[tuple[int, int, int], ...] = ()  # (rank, call, hash): arguments that differ
    recover_after: int = 0  # the call after which all ranks recover; no later wait has a limit, none may fail

    abort: bool = True  # to every peer, and to the own pad for the blocks beside
    agree: bool = True  # the block agrees on the failure of one thread
    carry: bool = True  # a call that fails, fails the calls after it in its launch
    zero: str = "launch"  # when the word is cleared that a block agrees through: or every "call", by wave 0
    poison: str = "block"  # later launches of the block return at once; or "none", or "channel": other blocks' too
    fall_through: bool = True  # a failed block still passes its barriers
    stop_writing: bool = True  # nothing but abort is written to a peer after a failed wait
    drain: bool = True  # recover: the rank's kernels have ended before anything else
    first_barrier: bool = True  # recover: nobody resets before all have drained
    second_barrier: bool = True  # recover: nobody launches before all have reset

    def peers(self, rank: int) -> list[int]:
        return [q for q in range(self.world) if q != rank]

    def ends_launch(self, call: int) -> bool:
        return call % self.calls_per_launch == 0 or call == self.calls

    def hash(self, rank: int, call: int) -> int:
        return next((h for r, c, h in self.hashes if (r, c) == (rank, call)), 0)


def wait(case: Case, rank: int, block: int, call: int) -> list[Step]:
    peers, own = case.peers(rank), case.hash(rank, call)
    words = [("pad", rank, block, q) for q in peers] + [("abort", rank)]
    recovered = bool(case.recover_after) and call > case.recover_after

    def come(r: Registers, seen: tuple[Any, ...]) -> bool:
        return all(EPOCHS.arrived(e, r.epoch) for e, _ in seen[: len(peers)])

    def ready(r: Registers, seen: tuple[Any, ...]) -> bool:
        return come(r, seen) or any(seen[len(peers) :])

    def judge(r: Registers, seen: tuple[Any, ...]) -> Registers:
        pads = seen[: len(peers)]
        in_step = all(EPOCHS.in_step(e, r.epoch) for e, _ in pads)
        alike = all(h == own for e, h in pads if e == r.epoch)
        if recovered and not (come(r, seen) and in_step and alike):
            raise Fault(f"call {call} fails after recover")
        return r._replace(failed=not (come(r, seen) and in_step and alike))

    def expired(r: Registers) -> Registers:
        if r.limits:
            raise Fault("a poisoned channel waits out a second limit")
        return r._replace(failed=True, limits=1)

    limit = None if recovered or rank in case.patient else expired
    return [Await(fixed(words), ready, judge, limit, when=well), Fence()]


def call_steps(case: Case, rank: int, block: int, wave: int, call: int) -> list[Step]:
    peers, own, taken = case.peers(rank), case.hash(rank, call), case.waves - 1 - wave
    writes: Callable[[Registers], bool] = well if case.stop_writing else always
    meet = Barrier((rank, block), when=always if case.fall_through else well)

    lasts = case.poison != "none" if (call - 1) % case.calls_per_launch == 0 else case.carry

    def begin(r: Registers) -> Registers:
        return r._replace(epoch=EPOCHS.next(r.epoch), failed=r.failed and lasts)

    def take(r: Registers, values: tuple[int, ...]) -> Registers:
        if any(value != call for value in values):
            raise Fault(f"call {call} succeeds with the data of calls {values}")
        if any(case.hash(q, call) != own for q in peers):
            raise Fault(f"call {call} succeeds with other arguments than a peer's")
        return r

    def learn(r: Registers, failed: tuple[bool, ...]) -> Registers:
        return r._replace(failed=r.failed or failed[0])

    def posted(q: int) -> Callable[[Registers], Any]:
        return lambda r: ("staging", q, block, r.epoch % 2, rank, wave)

    def slots(r: Registers) -> list[Any]:
        return [("staging", rank, block, r.epoch % 2, q, taken) for q in peers]

    steps: list[Step] = [Do(begin)]
    if case.zero == "call" and wave == 0:
        steps.append(Write(fixed(("failed", rank, block)), fixed(False)))
    if case.poison == "channel":
        steps.append(Load(fixed([("poisoned", rank, block)]), learn))
    steps += [Store(posted(q), fixed(call), when=writes) for q in peers]
    steps += [Drain(), meet]
    if wave == 0:
        steps += [
            Store(fixed(("pad", q, block, rank)), lambda r: (r.epoch, own), release=True, when=writes) for q in peers
        ]
        steps += wait(case, rank, block, call)
        if case.abort:
            to = peers if case.blocks == 1 else range(case.world)
            steps += [Store(fixed(("abort", q)), fixed(1), when=ill) for q in to]
        if case.waves > 1:
            steps.append(Write(fixed(("failed", rank, block)), fixed(True), when=ill))
    steps.append(meet)
    if case.waves > 1 and case.agree:
        steps.append(Load(fixed([("failed", rank, block)]), learn))
    steps.append(Load(slots, take, when=well))
    if wave == 0 and case.poison == "channel":
        steps += [Write(fixed(("poisoned", rank, b)), fixed(True), when=ill) for b in range(case.blocks)]
    ended = case.drain or call != case.recover_after
    return [*steps, Barrier((rank,), drain=ended)] if case.ends_launch(call) else steps


def recover(case: Case, rank: int, block: int, wave: int) -> list[Step]:
    """Collective, after the rank's kernels have ended: host barrier, reset what is mine, host barrier."""
    everyone = Barrier(())
    steps: list[Step] = [everyone] if case.first_barrier else []
    if wave == 0:
        zero: list[tuple[Any, Any]] = [(("pad", rank, block, q), (0, 0)) for q in case.peers(rank)]
        zero += [(("abort", rank), 0), (("failed", rank, block), False)]
        steps += [Write(fixed(address), fixed(value)) for address, value in zero]
    steps.append(Barrier((rank,)))
    if case.second_barrier:
        steps.append(everyone)
    return [*steps, Do(fixed(Registers()))]


def system(case: Case) -> System:
    ranks, blocks, waves = range(case.world), range(case.blocks), range(case.waves)

    def program(rank: int, block: int, wave: int) -> Program:
        if rank in case.absent:
            to = case.peers(rank) if case.host_abort and block == wave == 0 else []
            return tuple(Store(fixed(("abort", q)), fixed(1)) for q in to)
        steps: list[Step] = []
        for call in range(1, case.calls + 1):
            if (rank, block) in case.idle:
                steps += [Barrier((rank,), drain=True)] if case.ends_launch(call) else []
                continue
            steps += call_steps(case, rank, block, wave, call)
            if call == case.recover_after:
                steps += recover(case, rank, block, wave)
        return tuple(steps)

    memory: dict[Any, Any] = {("abort", r): 0 for r in ranks}
    for r in ranks:
        for b in blocks:
            memory |= {("failed", r, b): False, ("poisoned", r, b): False}
            for q in case.peers(r):
                memory["pad", r, b, q] = (0, 0)
                memory |= {("staging", r, b, slot, q, w): 0 for slot in (0, 1) for w in waves}
    return System(
        waves={(r, b, w): (program(r, b, w), Registers()) for r in ranks for b in blocks for w in waves}, memory=memory
    )
