# SPDX-License-Identifier: Apache-2.0
"""The abstract steps of the barrier kernel and of put/wait signals."""

from __future__ import annotations

from typing import Any

from .flags import Epochs, Registers, Shape, Variant, begin, expect, finish, signal, wait
from .steps import Await, Barrier, Do, Fault, Fence, Load, Program, Step, Store, System, Write, fixed


def barrier(shape: Shape, v: Variant, rank: int, block: int, wave: int) -> Program:
    """The one-shot without data. ``entered`` is a ghost word: no thread leaves before all threads have come."""
    others = [("entered", q, block, w) for q in range(shape.world) for w in range(shape.waves)]
    steps: list[Step] = []
    for call in range(1, shape.calls + 1):

        def left(r: Registers, entered: tuple[int, ...], call: int = call) -> Registers:
            if min(entered) < call:
                raise Fault(f"barrier {call} is left while a wave is at {min(entered)}")
            return r

        steps += [
            begin(v, rank, block),
            Do(lambda r: r._replace(epoch=v.epochs.next(r.epoch))),
            Write(fixed(("entered", rank, block, wave)), fixed(call)),
            *signal(shape, v, rank, block, wave),
            *wait(shape, v, rank, block, wave),
            Load(fixed(others), left),
            *finish(v, rank, block, wave),
            Barrier((rank,), drain=True),
        ]
    return tuple(steps)


def stream(messages: int, buffers: int, credit: bool, compare: str = "signed", first: int = 0) -> System:
    """Rank 0 sends ``messages`` through ``buffers`` slots: data, then put. Rank 1 waits, reads, and, with ``credit``,
    puts back. The n-th put stores the counter n; the m-th wait waits until the word has reached m. ``flag``: the word
    is 1 or 0, and the reader clears it."""
    epochs = Epochs()

    def count(n: int) -> int:
        word = first
        for _ in range(n):
            word = epochs.next(word)
        return word

    def wait_for(me: int, n: int) -> list[Step]:
        def ready(_: Any, seen: tuple[int, ...]) -> bool:
            return epochs.arrived(seen[0], count(n)) if compare == "signed" else seen[0] == value(n)

        steps: list[Step] = [Await(fixed([("signal", me)]), ready), Fence()]
        return [*steps, Write(fixed(("signal", me)), fixed(0))] if compare == "flag" else steps

    def value(n: int) -> int:
        return 1 if compare == "flag" else count(n)

    def put(to: int, n: int) -> Store:
        return Store(fixed(("signal", to)), fixed(value(n)), release=True)

    sender: list[Step] = []
    receiver: list[Step] = []
    for n in range(1, messages + 1):
        if credit and n > buffers:
            sender += wait_for(0, n - buffers)
        sender += [Store(fixed(("slot", n % buffers)), fixed(n)), put(1, n)]
        receiver += [*wait_for(1, n), Load(fixed([("slot", n % buffers)]), expect(n))]
        if credit:
            receiver.append(put(0, n))
    memory: dict[Any, int] = {("signal", r): first for r in (0, 1)} | {("slot", s): 0 for s in range(buffers)}
    waves = {(0, 0, 0): (tuple(sender), Registers()), (1, 0, 0): (tuple(receiver), Registers())}
    return System(waves=waves, memory=memory)


def opposite(*orders: tuple[str, str]) -> System:
    """Two ranks, each with two kernels on two channels, run one after the other: each meets its peer's once."""

    def meet(rank: int, channel: str) -> list[Step]:
        signal = Store(fixed((channel, 1 - rank)), fixed(1), release=True)
        return [signal, Await(fixed([(channel, rank)]), lambda r, seen: seen[0] == 1)]

    return System(
        waves={(r, 0, 0): (tuple(s for c in order for s in meet(r, c)), Registers()) for r, order in enumerate(orders)},
        memory={(channel, rank): 0 for channel in "ab" for rank in (0, 1)},
    )
