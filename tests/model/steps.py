# SPDX-License-Identifier: Apache-2.0
"""What the checker explores: waves that run lists of steps over shared words.

A *wave* is what the machine schedules. It is a step machine: a straight list of steps, a program counter and frozen
registers. Steps only go forward, so the state graph has no cycle and nothing can spin: a wait whose condition does not
hold is not a step at all until memory changes. Two things can go wrong, and the checker finds both:

- a *fault*: an ``update`` raises :class:`Fault`, or ``final`` does for the memory of an end state;
- *stuck*: no step is possible and not every wave has ended. With waits as above this is every deadlock, and every wait
  for something that does not come.

The machine (``docs/memory_model.md`` says what each real target gives):

- A :class:`Store` goes to the buffer of its *block* and lands at any later time, in any order; two stores of one wave
  to one word keep their order. A ``release`` store lands after all earlier stores of its own wave, and, on a
  *cumulative* machine, after the stores of other waves of the block from before a block barrier that both passed.
- :class:`Drain` waits until the wave's own stores have landed. :class:`Barrier` orders waves and drains nothing,
  unless ``drain`` is set (the end of a kernel).
- :class:`Write` and :class:`Swap` act at once: the shared memory of a block, or an atomic.
- :class:`Load` reads memory, or, for ``early`` words, perhaps a value fetched at any time since the last
  :class:`Fence` of the block: a stale cache line, or a load issued too soon. :class:`Await` always reads memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Address = Any  # hashable; programs use tuples
Registers = Any  # any frozen, hashable value; programs use NamedTuples
Of = Callable[[Registers], Any]


class Fault(Exception):
    """Raised by an update of a step: what must never happen has happened."""


def always(_: Registers) -> bool:
    return True


def fixed(value: Any) -> Of:
    """A value, an address or a sequence of addresses that depends on no register."""
    return lambda _: value


@dataclass(frozen=True)
class Step:
    """``when`` does not hold: the wave passes over the step."""

    when: Of = field(default=always, kw_only=True, compare=False)


@dataclass(frozen=True)
class Do(Step):
    update: Of


@dataclass(frozen=True)
class Store(Step):
    address: Of
    value: Of
    release: bool = False


@dataclass(frozen=True)
class Write(Step):
    address: Of
    value: Of


@dataclass(frozen=True)
class Swap(Step):
    """Compare-and-swap; ``update(registers, succeeded)``."""

    address: Of
    expected: Of
    value: Of
    update: Callable[[Registers, bool], Registers]


@dataclass(frozen=True)
class Load(Step):
    """``update(registers, values)`` of the words at ``addresses``, read together."""

    addresses: Of
    update: Callable[[Registers, tuple[Any, ...]], Registers]


@dataclass(frozen=True)
class Await(Step):
    """A wait: ``update(registers, values)`` once ``ready(registers, values)``; ``expired(registers)`` may come instead
    at any time while it is not ready, where given: the time limit."""

    addresses: Of
    ready: Callable[[Registers, tuple[Any, ...]], bool]
    update: Callable[[Registers, tuple[Any, ...]], Registers] = lambda registers, _: registers
    expired: Of | None = None


@dataclass(frozen=True)
class Drain(Step):
    pass


@dataclass(frozen=True)
class Fence(Step):
    pass


@dataclass(frozen=True)
class Barrier(Step):
    """Passed together by all waves whose names begin with ``group``; ``drain``: once their blocks' stores landed."""

    group: tuple[Any, ...]
    drain: bool = False


Program = tuple[Step, ...]
Name = tuple[Any, ...]  # (rank, block, wave), or longer; a block is all but the last


@dataclass(frozen=True)
class System:
    waves: dict[Name, tuple[Program, Registers]]
    memory: dict[Address, Any]
    cumulative: bool = False
    early: dict[Name, tuple[Address, ...]] = field(default_factory=dict)  # block → words it may load too soon
    final: Callable[[dict[Address, Any]], None] | None = None
