# SPDX-License-Identifier: Apache-2.0
"""Launches of one stream that take their places before the one ahead of them has ended, and wait there."""

from __future__ import annotations

from typing import Any

from .steps import Await, Drain, Fault, Load, Program, Step, Store, System, Write, fixed

# A launch: how it is launched, and what its blocks do. "access" reads what the blocks of the last accessing launch
# wrote, the other block's word, and writes into the buffer that that launch read.
KINDS = {
    "turn": ("early", ("wait", "let", "access")),  # flycomm's
    "eager": ("early", ("let", "wait", "access")),  # a kernel of others, with the same wait
    "late": ("early", ("let", "access", "wait")),
    "half": ("early", ("wait of block 0", "let", "access")),
    "blind": ("early", ("let",)),
    "plain": ("in order", ("access",)),  # a kernel that knows nothing of this
}
BLOCKS = (0, 1)


def system(*launches: str, places: bool = False) -> System:
    """Faults: an access out of order; with ``places`` a third launch that holds some while the first has not ended."""
    accessed = 0
    waves: dict[Any, tuple[Program, None]] = {}
    memory: dict[Any, int] = {("data", buffer, b): 0 for buffer in (0, 1) for b in BLOCKS}
    for launch, kind in enumerate(launches):
        memory |= {(word, launch, b): 0 for word in ("let", "ended") for b in BLOCKS}
        waves |= {(launch, b, 0): (_program(launch, b, kind, accessed, places), None) for b in BLOCKS}
        accessed += "access" in KINDS[kind][1]
    return System(waves=waves, memory=memory)


def _program(launch: int, block: int, kind: str, accessed: int, places: bool) -> Program:
    how, does = KINDS[kind]
    steps: list[Step] = []
    if launch:
        steps.append(_ended(launch - 1) if how == "in order" else _let(launch - 1))
    if places and launch > 1:
        steps.append(Load(fixed(_words("ended", launch - 2)), _two_at_most))
    for one in does:
        if one == "access":
            steps += _access(accessed, block)
        elif one == "let":
            steps.append(Write(fixed(("let", launch, block)), fixed(1)))
        elif launch and (one == "wait" or block == 0):
            steps.append(_ended(launch - 1))
    return (*steps, Drain(), Write(fixed(("ended", launch, block)), fixed(1)))


def _words(word: str, launch: int) -> list[Any]:
    return [(word, launch, b) for b in BLOCKS]


def _ended(launch: int) -> Step:
    return Await(fixed(_words("ended", launch)), lambda _, ended: all(ended))


def _let(launch: int) -> Step:
    """Every block has let the next one start, or has ended."""
    both = _words("let", launch) + _words("ended", launch)
    return Await(fixed(both), lambda _, seen: all(seen[b] or seen[len(BLOCKS) + b] for b in BLOCKS))


def _two_at_most(registers: None, ended: tuple[int, ...]) -> None:
    if not all(ended):
        raise Fault("three at once")


def _access(number: int, block: int) -> list[Step]:
    def check(registers: None, values: tuple[int, ...]) -> None:
        if values != (number,):
            raise Fault(f"access {number} reads {values}")

    read = Load(fixed([("data", number % 2, 1 - block)]), check)
    return [read, Store(fixed(("data", (number + 1) % 2, block)), fixed(number + 1))]
