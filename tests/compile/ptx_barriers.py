# SPDX-License-Identifier: Apache-2.0
"""PTX as a graph of instructions: whether a block barrier lies between a shared array's reads and its next writes.

Fibers take turns where they wait, so no run on the host shows a warp that overtakes another between two barriers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

_CARRIES = ("mov", "add", "sub", "selp", "cvta", "mad", "cvt")  # an address from its operands to its result
_INSTRUCTION = re.compile(r"(@!?%p\d+\s+)?([a-z][\w.:]*)\s*(.*?);")
_ADDRESS = re.compile(r"\[([^\]+]+)(?:\+[^\]]*)?\]")


@dataclass(frozen=True)
class _Instruction:
    may_be_skipped: bool
    opcode: str
    operands: str


def arrays(text: str, num_bytes: int) -> set[str]:
    """Names of the shared arrays of this size."""
    return set(re.findall(rf"\.shared \.align \d+ \.b8 (\S+)\[{num_bytes}\]", text))


def unordered(text: str, array: str) -> list[tuple[str, str]]:
    """Pairs of a read and a write of the array, in this order or the other, with a way between them past no barrier."""
    code, labels = _parse(text)
    addresses = _derived(code, array)
    kinds = [_kind(one, addresses) for one in code]
    found = []
    for i, kind in enumerate(kinds):
        if kind not in ("read", "write"):
            continue
        seen: set[int] = set()
        ahead = _next(code, labels, i)
        while ahead:
            j = ahead.pop()
            if j in seen or kinds[j] == "barrier":
                continue
            seen.add(j)
            if kinds[j] not in ("", kind):
                found.append((code[i].operands, code[j].operands))
            ahead += _next(code, labels, j)
    return found


def _parse(text: str) -> tuple[list[_Instruction], dict[str, int]]:
    code: list[_Instruction] = []
    labels = {}
    for line in text[text.index(".entry") :].splitlines():
        line = line.strip()
        if label := re.match(r"(\$\w+):", line):
            labels[label[1]] = len(code)
        elif instruction := _INSTRUCTION.match(line):
            code.append(_Instruction(bool(instruction[1]), instruction[2], instruction[3]))
    return code, labels


def _derived(code: list[_Instruction], array: str) -> set[str]:
    """The array, and the registers that hold an address in it."""
    uses = defaultdict(set)
    for one in code:
        if one.opcode.split(".")[0] in _CARRIES:
            result, *operands = (part.strip() for part in one.operands.split(","))
            for operand in operands:
                uses[operand].add(result)
    found, ahead = {array}, [array]
    while ahead:
        more = uses[ahead.pop()] - found
        found |= more
        ahead += more
    return found


def _kind(one: _Instruction, addresses: set[str]) -> str:
    if one.opcode.startswith("bar."):
        return "barrier"
    if ".shared" not in one.opcode:
        return ""
    address = _ADDRESS.search(one.operands)
    if address is None or address[1].strip() not in addresses:
        return ""
    return "read" if one.opcode.startswith("ld") else "write"


def _next(code: list[_Instruction], labels: dict[str, int], i: int) -> list[int]:
    one = code[i]
    following = [] if one.opcode in ("bra", "bra.uni", "ret") and not one.may_be_skipped else [i + 1]
    if one.opcode.startswith("bra"):
        following.append(labels[one.operands])
    return [j for j in following if j < len(code)]
