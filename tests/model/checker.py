# SPDX-License-Identifier: Apache-2.0
"""The search: every interleaving of a :class:`System`, depth first, states stored whole (not as hashes)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from .steps import Await, Barrier, Do, Drain, Fault, Fence, Load, Program, Registers, Step, Store, Swap, System, Write


@dataclass
class Outcome:
    """``faults``: each message with the first steps that led to it. Empty: every interleaving is right."""

    states: int = 0
    faults: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.states} states"]
        for message, trace in self.faults.items():
            lines += [message, *(f"    {step}" for step in trace)]
        return "\n".join(lines)


class TooLarge(Exception):
    """The case has more states than its limit: the test is too big, nothing is proved."""


def check(system: System, until: str = "", limit: int = 2_000_000) -> Outcome:
    """Explore all interleavings, past no fault; stop at the first fault whose message contains ``until``."""
    return _Search(system, limit).run(until)


# A state is (waves, buffers, caches, memory): per wave (pc, registers); per block its pending stores (phase, wave,
# address, value, release), where phases count barriers on a cumulative machine and are 0 otherwise; per block its
# early loads (address, value); one value a word.
State = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]
Label = tuple[Any, ...]


class _Search:
    def __init__(self, system: System, limit: int):
        self.system, self.limit = system, limit
        self.names = list(system.waves)
        self.programs = [system.waves[name][0] for name in self.names]
        self.blocks = list(dict.fromkeys(name[:-1] for name in self.names))
        self.block_of = [self.blocks.index(name[:-1]) for name in self.names]
        self.waves_of = [[w for w, b in enumerate(self.block_of) if b == block] for block in range(len(self.blocks))]
        self.addresses = list(system.memory)
        self.index = {address: i for i, address in enumerate(self.addresses)}
        self.early = (
            [tuple(self.index[address] for address in system.early.get(block, ())) for block in self.blocks]
            if system.early
            else []
        )
        self.members: dict[tuple[Any, ...], list[int]] = {}
        self.phases = [self._count_barriers(program) for program in self.programs]
        self.local: dict[tuple[int, int, Registers], tuple[int, Registers, tuple[Any, ...]]] = {}

    @staticmethod
    def _count_barriers(program: Program) -> list[int]:
        phases = [0]
        for step in program:
            phases.append(phases[-1] + isinstance(step, Barrier))
        return phases

    def _group(self, group: tuple[Any, ...]) -> list[int]:
        if group not in self.members:
            self.members[group] = [w for w, name in enumerate(self.names) if name[: len(group)] == group]
        return self.members[group]

    # ---- steps that nobody else can observe

    def _advance(self, w: int, pc: int, registers: Registers) -> tuple[int, Registers, tuple[Any, ...]]:
        """Run wave ``w`` up to its next visible or waiting step; also gives the stores it put in the buffer."""
        key = (w, pc, registers)
        if key in self.local:
            return self.local[key]
        program, stores = self.programs[w], []
        while pc < len(program):
            step = program[pc]
            if step.when(registers):
                if isinstance(step, Do):
                    registers = step.update(registers)
                elif isinstance(step, Store):
                    address = self.index[step.address(registers)]
                    phase = self.phases[w][pc] if self.system.cumulative else 0
                    stores.append((phase, w, address, step.value(registers), step.release))
                else:
                    break
            pc += 1
        self.local[key] = pc, registers, tuple(stores)
        return self.local[key]

    def _settle(self, state: State, moved: Iterable[int]) -> State:
        """Take every unobservable step that is possible, starting with the waves that ``moved``."""
        waves, buffers, caches, memory = list(state[0]), list(state[1]), list(state[2]), state[3]
        queue = list(moved)
        while queue:
            w = queue.pop()
            pc, registers, stores = self._advance(w, *waves[w])
            waves[w] = (pc, registers)
            block, program = self.block_of[w], self.programs[w]
            if stores:
                # one order for states that differ in nothing: waves are ordered by barriers only
                buffers[block] = tuple(sorted(buffers[block] + stores, key=itemgetter(0, 1)))
            if pc == len(program):
                continue
            step = program[pc]
            if isinstance(step, Drain):
                if all(entry[1] != w for entry in buffers[block]):
                    waves[w] = (pc + 1, registers)
                    queue.append(w)
            elif isinstance(step, Fence):
                caches[block] = ()
                waves[w] = (pc + 1, registers)
                queue.append(w)
            elif isinstance(step, Barrier) and self._barrier_ready(step, waves, buffers):
                for member in self._group(step.group):
                    waves[member] = (waves[member][0] + 1, waves[member][1])
                    queue.append(member)
        return tuple(waves), tuple(buffers), tuple(caches), memory

    def _barrier_ready(self, step: Barrier, waves: Sequence[Any], buffers: Sequence[Any]) -> bool:
        for member in self._group(step.group):
            pc = waves[member][0]
            program = self.programs[member]
            if pc == len(program) or program[pc] != step:
                return False
            if step.drain and buffers[self.block_of[member]]:
                return False
        return True

    # ---- steps that others can observe

    def _successors(self, state: State) -> Iterator[tuple[Label, State | Fault]]:
        waves, buffers, caches, memory = state
        for w, (pc, registers) in enumerate(waves):
            if pc < len(self.programs[w]):
                label: Label = ("step", w, pc)
                try:
                    for result, new_memory in self._visible(w, self.programs[w][pc], registers, state):
                        moved = _replace(waves, w, (pc + 1, result))
                        yield label, self._settle((moved, buffers, caches, new_memory), (w,))
                except Fault as fault:
                    yield label, fault
        for block, buffer in enumerate(buffers):
            # a landing can only let a drain, or a draining barrier, of its block go on
            woken = [w for w in self.waves_of[block] if self._drains(w, waves[w][0])] if buffer else []
            for i, entry in enumerate(buffer):
                if self._may_land(entry, buffer[:i]):
                    new_memory = _replace(memory, entry[2], entry[3])
                    rest = _replace(buffers, block, buffer[:i] + buffer[i + 1 :])
                    landed = (waves, rest, caches, new_memory)
                    yield ("land", entry), self._settle(landed, woken) if woken else landed
        for block, cache in enumerate(caches if self.early else ()):
            held = dict(cache)
            for address in self.early[block]:
                if held.get(address) != memory[address]:
                    fetched = tuple(sorted({**held, address: memory[address]}.items()))
                    yield ("fetch", block, address), (waves, buffers, _replace(caches, block, fetched), memory)

    def _drains(self, w: int, pc: int) -> bool:
        if pc == len(self.programs[w]):
            return False
        step = self.programs[w][pc]
        return isinstance(step, Drain) or (isinstance(step, Barrier) and step.drain)

    def _may_land(self, entry: tuple[Any, ...], earlier: tuple[Any, ...]) -> bool:
        phase, wave, address, _, release = entry
        for other_phase, other_wave, other_address, _, _ in earlier:
            before = other_wave == wave or other_phase < phase
            if before and (release or other_address == address):
                return False
        return True

    def _visible(
        self, w: int, step: Step, registers: Registers, state: State
    ) -> Iterator[tuple[Registers, tuple[Any, ...]]]:
        """Registers and memory after ``step``; nothing while it cannot go."""
        memory = state[3]
        if isinstance(step, Write):
            yield registers, _replace(memory, self.index[step.address(registers)], step.value(registers))
        elif isinstance(step, Swap):
            address = self.index[step.address(registers)]
            if memory[address] == step.expected(registers):
                yield step.update(registers, True), _replace(memory, address, step.value(registers))
            else:
                yield step.update(registers, False), memory
        elif isinstance(step, Load):
            cache = dict(state[2][self.block_of[w]])
            found = [self.index[address] for address in step.addresses(registers)]
            yield step.update(registers, tuple(cache.get(address, memory[address]) for address in found)), memory
        elif isinstance(step, Await):
            values = tuple(memory[self.index[address]] for address in step.addresses(registers))
            if step.ready(registers, values):
                yield step.update(registers, values), memory
            elif step.expired is not None:
                yield step.expired(registers), memory

    # ---- the search

    def run(self, until: str) -> Outcome:
        outcome = Outcome()
        path: list[Label] = []
        empty = tuple(() for _ in set(self.block_of))
        waves = tuple((0, registers) for _, registers in self.system.waves.values())
        start = self._settle((waves, empty, empty, tuple(self.system.memory.values())), range(len(waves)))
        seen = {start}
        stack = [self._expand(start)]
        while stack and not any(until in message for message in outcome.faults):
            if not stack[-1]:
                stack.pop()
                del path[-1:]
                continue
            label, state = stack[-1].pop()
            if isinstance(state, Fault):
                outcome.faults.setdefault(str(state), [self._describe(step) for step in (*path, label) if step])
            elif state not in seen:
                seen.add(state)
                path.append(label)
                stack.append(self._expand(state))
                if len(seen) > self.limit:
                    raise TooLarge(f"more than {self.limit} states; make the case smaller or raise the limit")
        outcome.states = len(seen)
        return outcome

    def _expand(self, state: State) -> list[tuple[Label, State | Fault]]:
        """All successors; an end state is judged. An early fetch brings nobody further: it does not count as one."""
        successors = list(self._successors(state))
        if all(label[0] == "fetch" for label, _ in successors):
            waves, _, _, memory = state
            waiting = [w for w, (pc, _) in enumerate(waves) if pc < len(self.programs[w])]
            if waiting:
                return [((), Fault("stuck: " + "; ".join(self._where(w, waves[w]) for w in waiting)))]
            if self.system.final is not None:
                try:
                    self.system.final(dict(zip(self.addresses, memory, strict=True)))
                except Fault as fault:
                    return [((), fault)]
        return successors

    def _where(self, w: int, wave: tuple[int, Registers]) -> str:
        return f"wave {self.names[w]} at step {wave[0]} ({self._kind(w, wave[0])}), {wave[1]}"

    def _describe(self, label: Label) -> str:
        if label[0] == "step":
            return f"wave {self.names[label[1]]} takes step {label[2]} ({self._kind(*label[1:])})"
        if label[0] == "land":
            _, w, address, value, _ = label[1]
            return f"{self.addresses[address]} = {value} lands, from wave {self.names[w]}"
        return f"block {self.blocks[label[1]]} fetches {self.addresses[label[2]]} early"

    def _kind(self, w: int, pc: int) -> str:
        return type(self.programs[w][pc]).__name__


def _replace(values: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    return (*values[:i], value, *values[i + 1 :])
