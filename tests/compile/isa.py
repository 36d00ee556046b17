# SPDX-License-Identifier: Apache-2.0
"""AMD GPU assembly as data: functions, basic blocks, loops, and where an address comes from.

Reads what LLVM writes (:func:`flycomm.compile._lowered.assembly`), of gfx12 after :mod:`isa_gfx12`. ``isa_rules.py``
says with it what compiled kernels must look like.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, reduce
from heapq import heappop, heappush
from typing import Any, TypeVar

from isa_gfx12 import is_gfx12, translate

S = TypeVar("S")
Origins = frozenset[str]
NOWHERE: Origins = frozenset()

_SIZES = re.compile(r"dwordx\d+|dword|short|byte|x2")
_BYTES = {"dword": 4, "short": 2, "byte": 1, "x2": 8}
_REGISTER = re.compile(r"\b(?:([sva])(?:(\d+)|\[(\d+):(\d+)\])|(vcc(?:_lo|_hi)?)\b)")
_VCC = {"vcc": ["vcc_lo", "vcc_hi"], "vcc_lo": ["vcc_lo"], "vcc_hi": ["vcc_hi"]}
_CARRY = re.compile(r"v_\w+_co_|v_mad_[ui]64|v_div_scale")  # two results: the second is a mask of lanes
_LANES = ("v_readlane", "v_writelane")  # how scalar registers are spilled: one into each lane of a vector register
_NO_RESULT = ("s_cmp", "s_bitcmp", "s_waitcnt", "s_barrier", "s_branch", "s_cbranch", "s_endpgm", "s_nop", "s_sleep")
_NO_RESULT += ("s_setprio", "s_setreg", "s_inst_prefetch", "buffer_inv", "buffer_wbl2", "ds_write")
_NO_RESULT += ("ds_store", "v_cmpx")


@dataclass(frozen=True, eq=False)
class Instruction:
    """``operands`` are split at commas; ``words`` is everything after the opcode, modifiers such as ``sc0`` too."""

    line: int
    opcode: str
    operands: tuple[str, ...]
    words: frozenset[str]

    def __str__(self) -> str:
        return f"line {self.line}: {self.opcode} {', '.join(self.operands)}"

    @property
    def system(self) -> bool:
        """System scope, in both directions."""
        return {"sc0", "sc1"} <= self.words

    @cached_property
    def written(self) -> list[str]:
        """The registers that it overwrites."""
        opcode = self.opcode
        if opcode.startswith(_NO_RESULT) or "_store_" in opcode or not self.operands:
            return []
        if "_atomic_" in opcode and len(self.operands) < 4:
            return []
        return _all(self.operands[: _num_results(opcode)])

    def reloads(self) -> bool:
        """Whether it brings back a scalar register that was spilled."""
        return self.opcode.startswith("v_readlane")

    def waits(self) -> bool:
        """``vmcnt(0)``: this wave's loads and stores are all done."""
        return self.opcode == "s_waitcnt" and "vmcnt(0)" in self.words

    def waits_for_stores(self) -> bool:
        """They, or with the counter that gfx12 has for them its stores alone."""
        return self.waits() or (self.opcode == "s_waitcnt" and "storecnt(0)" in self.words)

    def is_barrier(self) -> bool:
        return self.opcode == "s_barrier"

    def invalidates(self) -> bool:
        return self.opcode == "buffer_inv"


@dataclass
class Block:
    """Straight-line code; ``next`` are the indices of the blocks that may follow."""

    label: str
    code: list[Instruction] = field(default_factory=list)
    next: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Loop:
    """A natural loop: the blocks from ``header`` to the branches back to it."""

    header: int
    blocks: frozenset[int]


@dataclass(frozen=True)
class Access:
    """One access to global memory.

    ``address``: the kernel arguments that the address is computed from; ``*name`` stands for a value loaded through the
    pointer ``name``. ``value``: the same for what is stored.
    """

    instruction: Instruction
    kind: str  # "load", "store", "atomic" or "scalar" (s_load)
    num_bytes: int
    address: Origins
    value: Origins


@dataclass
class Function:
    name: str
    blocks: list[Block]
    kernarg: int  # the first of the two SGPRs that point to the kernel's arguments

    def instructions(self) -> list[Instruction]:
        return [instruction for block in self.blocks for instruction in block.code]

    @cached_property
    def loops(self) -> list[Loop]:
        """One a header, inner loops too."""
        before = _predecessors(self.blocks)
        dominators = _dominators(self.blocks, before)
        bodies: dict[int, set[int]] = defaultdict(set)
        for tail, block in enumerate(self.blocks):
            for header in block.next:
                if header in dominators[tail]:
                    bodies[header] |= {header} | _reaching(tail, header, before)
        return [Loop(header, frozenset(blocks)) for header, blocks in bodies.items()]

    def code_of(self, loop: Loop) -> list[Instruction]:
        return [instruction for index in sorted(loop.blocks) for instruction in self.blocks[index].code]

    def flow(self, entry: S, step: Callable[[Instruction, S], S], join: Callable[[S, S], S]) -> dict[Instruction, S]:
        """What holds before each instruction, over every path: a forward data-flow analysis to its fixed point."""
        states: dict[int, S] = {0: entry}
        work = [0]  # a heap: what comes first in the text mostly comes first on a path
        result: dict[Instruction, S] = {}
        while work:
            index = heappop(work)
            while work and work[0] == index:
                heappop(work)
            state = states[index]
            for instruction in self.blocks[index].code:
                result[instruction] = state
                state = step(instruction, state)
            for following in self.blocks[index].next:
                merged = join(states[following], state) if following in states else state
                if following not in states or merged != states[following]:
                    states[following] = merged
                    heappush(work, following)
        return result


def parse(text: str) -> dict[str, Function]:
    """The kernels in an assembly text by name."""
    functions = {}
    lines = text.splitlines()
    for name, directives in _directives(text).items():
        first = next(number for number, line in enumerate(lines) if line.startswith(f"{name}:"))
        last = next(number for number in range(first, len(lines)) if lines[number].startswith(".Lfunc_end"))
        body = lines[first + 1 : last]
        code = translate(body) if is_gfx12(text) else ((i, line.split(";")[0].strip()) for i, line in enumerate(body))
        functions[name] = Function(name, _blocks((first + 2 + i, line) for i, line in code), _kernarg(directives))
    return functions


def _directives(text: str) -> dict[str, list[str]]:
    """The ``.amdhsa_kernel`` directives of each kernel."""
    found = re.findall(r"^\s*\.amdhsa_kernel (\S+)\n(.*?)^\s*\.end_amdhsa_kernel", text, re.MULTILINE | re.DOTALL)
    return {name: body.split("\n") for name, body in found}


def _kernarg(directives: Sequence[str]) -> int:
    values = {words[0]: words[1] for line in directives if len(words := line.split()) == 2}
    assert values[".amdhsa_user_sgpr_kernarg_segment_ptr"] == "1"
    assert values.get(".amdhsa_user_sgpr_kernarg_preload_length", "0") == "0", "preloaded arguments are not followed"
    return sum(2 for name in ("dispatch_ptr", "queue_ptr") if values.get(f".amdhsa_user_sgpr_{name}") == "1")


def _blocks(lines: Iterable[tuple[int, str]]) -> list[Block]:
    """Of (number, line) pairs."""
    blocks = [Block("")]
    for number, line in lines:
        if label := re.fullmatch(r"(\.L\w+):", line):
            if blocks[-1].code or blocks[-1].label:
                blocks.append(Block(label.group(1)))
            else:
                blocks[-1].label = label.group(1)
        elif line and not line.startswith("."):
            blocks[-1].code.append(_instruction(number, line))
            if line.startswith(("s_branch", "s_cbranch", "s_endpgm")):
                blocks.append(Block(""))
    if not blocks[-1].code and not blocks[-1].label:
        blocks.pop()
    labels = {block.label: index for index, block in enumerate(blocks) if block.label}
    for index, block in enumerate(blocks):
        end = block.code[-1] if block.code else None
        if end is not None and end.opcode.startswith(("s_branch", "s_cbranch")):
            block.next.append(labels[end.operands[0]])
        if (end is None or end.opcode not in ("s_branch", "s_endpgm")) and index + 1 < len(blocks):
            block.next.append(index + 1)
    return blocks


def _instruction(number: int, text: str) -> Instruction:
    opcode, *rest = text.split(None, 1)
    chunks = [chunk.split() for chunk in re.split(r",\s*(?![^\[]*\])", rest[0])] if rest else []
    operands = tuple(words[0] for words in chunks)
    return Instruction(number, opcode, operands, frozenset(word for words in chunks for word in words))


def _predecessors(blocks: Sequence[Block]) -> dict[int, set[int]]:
    before: dict[int, set[int]] = defaultdict(set)
    for index, block in enumerate(blocks):
        for following in block.next:
            before[following].add(index)
    return before


def _dominators(blocks: Sequence[Block], before: dict[int, set[int]]) -> list[set[int]]:
    everything = set(range(len(blocks)))
    dominators = [{0}] + [set(everything) for _ in blocks[1:]]
    changed = True
    while changed:
        changed = False
        for index in range(1, len(blocks)):
            known = [dominators[one] for one in before[index]]
            found = {index} | (set.intersection(*known) if known else set())
            if found != dominators[index]:
                dominators[index], changed = found, True
    return dominators


def _reaching(tail: int, header: int, before: dict[int, set[int]]) -> set[int]:
    body, work = {header}, [tail]
    while work:
        index = work.pop()
        if index not in body:
            body.add(index)
            work += before[index]
    return body


@cache
def registers(operand: str) -> list[str]:
    """``"v[4:5]"`` → ``["v4", "v5"]``; nothing for constants and for special registers other than ``vcc``."""
    found = _REGISTER.search(operand)
    if found is None:
        return []
    kind, single, first, last, special = found.groups()
    if special:
        return _VCC[special]
    numbers = [int(single)] if single is not None else range(int(first), int(last) + 1)
    return [f"{kind}{number}" for number in numbers]


def _num_results(opcode: str) -> int:
    return 2 if _CARRY.search(opcode) else 1


def accesses(function: Function, arguments: Sequence[dict[str, Any]]) -> list[Access]:
    """Every access to global memory outside the argument block; ``arguments`` as in the manifest."""
    base = f"s{function.kernarg}", f"s{function.kernarg + 1}"
    entry = {register: frozenset({"kernarg"}) for register in base}
    states = function.flow(entry, lambda instruction, state: _step(instruction, state, arguments), _union)
    found = []
    for instruction, state in states.items():
        kind, address, value = _parts(instruction)
        if kind and "kernarg" not in (where := _origins(address, state)):
            found.append(Access(instruction, kind, _num_bytes(instruction.opcode), where, _origins(value, state)))
    return found


def _parts(instruction: Instruction) -> tuple[str, list[str], list[str]]:
    """Kind of access, registers of its address, registers of what it stores."""
    opcode, operands = instruction.opcode, instruction.operands
    if opcode.startswith("s_load"):
        return "scalar", registers(operands[1]), []
    if not opcode.startswith(("global_", "flat_", "buffer_load", "buffer_store", "buffer_atomic")):
        return "", [], []
    rest = list(operands)
    if opcode.startswith("buffer_"):  # data first, then offset and descriptor
        kind = "load" if "_load" in opcode else "store" if "_store" in opcode else "atomic"
        return kind, _all(rest[1:]), [] if kind == "load" else _all(rest[:1])
    if "_load" in opcode:
        return "load", _all(rest[1:]), []
    if "_store" in opcode:
        return "store", _all([rest[0], *rest[2:]]), _all(rest[1:2])
    if len(rest) == 4:
        rest = rest[1:]
    return "atomic", _all([rest[0], *rest[2:]]), _all(rest[1:2])


def _all(operands: Sequence[str]) -> list[str]:
    return [register for operand in operands for register in registers(operand)]


def _num_bytes(opcode: str) -> int:
    found = _SIZES.search(opcode)
    if found is None:
        return 4  # a 32-bit atomic
    size = found.group()
    return 4 * int(size.removeprefix("dwordx")) if size.startswith("dwordx") else _BYTES[size]


def _origins(names: Sequence[str], state: dict[str, Origins]) -> Origins:
    return reduce(frozenset.union, (state.get(name, NOWHERE) for name in names), NOWHERE)


def _union(one: dict[str, Origins], other: dict[str, Origins]) -> dict[str, Origins]:
    merged = other | one
    for name in one.keys() & other.keys():
        if one[name] is not other[name]:
            merged[name] = one[name] | other[name]
    return merged


def _step(
    instruction: Instruction, state: dict[str, Origins], arguments: Sequence[dict[str, Any]]
) -> dict[str, Origins]:
    results = instruction.written
    if not results:
        return state
    if instruction.opcode.startswith(_LANES) and instruction.operands[2].isdigit():
        return state | _through_lane(*instruction.operands, state)
    for name in results:
        if f"{name}:" in state:  # no longer a register of lanes
            state = {known: origins for known, origins in state.items() if not known.startswith(f"{name}:")}
    kind, address, _ = _parts(instruction)
    where = _origins(address, state)
    if kind == "scalar" and "kernarg" in where:
        offset = int(instruction.operands[2], 0)  # LLVM knows it: the argument block is not indexed
        return state | {name: _argument(offset + 4 * i, arguments) for i, name in enumerate(results)}
    if kind:
        loaded = frozenset(f"*{origin}" for origin in where if not origin.startswith("*"))
        return state | dict.fromkeys(results, loaded)
    if instruction.opcode.startswith(("ds_", "v_cmp", "s_sendmsg", "s_mem", "s_getreg", "s_getpc")):
        return state | dict.fromkeys(results, NOWHERE)
    sources = instruction.operands[_num_results(instruction.opcode) :]
    return state | dict.fromkeys(results, _origins(_all(sources), state))


def _through_lane(result: str, source: str, lane: str, state: dict[str, Origins]) -> dict[str, Origins]:
    """A lane has origins of its own: the others hold other scalars."""
    if source.startswith("v"):
        return {result: state.get(f"{source}:{lane}", state.get(source, NOWHERE))}
    return {f"{result}:": NOWHERE, f"{result}:{lane}": state.get(source, NOWHERE)}


def _argument(offset: int, arguments: Sequence[dict[str, Any]]) -> Origins:
    for argument in arguments:
        if argument["offset"] <= offset < argument["offset"] + argument["size"]:
            return frozenset({argument["name"] or f"+{argument['offset']}"})
    return NOWHERE
