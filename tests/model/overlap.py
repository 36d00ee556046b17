# SPDX-License-Identifier: Apache-2.0
"""Two launches of one block at the same time: what the compare-and-swap of rule 3 notices, and what it does not."""

from __future__ import annotations

from typing import Any, NamedTuple

from .steps import Barrier, Fault, Load, Program, Step, Swap, System, Write, fixed


class Registers(NamedTuple):
    epoch: int = 0
    noticed: bool = False


def system(waves: int, compare: bool) -> System:
    """An epoch used by both launches, or by a part of a block only, must be noticed by one of them. ``compare``: every
    wave compares its epoch with that of wave 0 after the first block barrier."""

    def program(launch: int, wave: int) -> Program:
        steps: list[Step] = [
            Load(fixed(["state"]), lambda r, s: r._replace(epoch=s[0] + 1)),
            Write(fixed(("used", launch, wave)), lambda r: r.epoch),
            Barrier((launch,)),
        ]
        if compare:
            steps.append(
                Load(fixed([("used", launch, 0)]), lambda r, s: r._replace(noticed=s[0] != r.epoch)),
            )
            steps.append(Write(fixed("noticed"), fixed(1), when=lambda r: r.noticed))
        steps.append(Barrier((launch,)))
        if wave == 0:
            steps += [
                Swap(
                    fixed("state"),
                    lambda r: r.epoch - 1,
                    lambda r: r.epoch,
                    lambda r, swapped: r._replace(noticed=not swapped),
                ),
                Write(fixed("noticed"), fixed(1), when=lambda r: r.noticed),
            ]
        return tuple(steps)

    def final(end: dict[Any, Any]) -> None:
        first, second = ({end["used", launch, w] for w in range(waves)} for launch in (0, 1))
        if not end["noticed"] and (len(first) > 1 or len(second) > 1 or first & second):
            raise Fault(f"launches used epochs {first} and {second} and nobody noticed")

    memory: dict[Any, int] = {"state": 0, "noticed": 0}
    memory |= {("used", launch, w): 0 for launch in (0, 1) for w in range(waves)}
    return System(
        waves={(launch, w): (program(launch, w), Registers()) for launch in (0, 1) for w in range(waves)},
        memory=memory,
        final=final,
    )
