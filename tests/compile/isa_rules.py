# SPDX-License-Identifier: Apache-2.0
"""What the rules of docs/memory_model.md look like in compiled AMD code. Each returns the violations, as sentences."""

from __future__ import annotations

import re
from collections.abc import Sequence

from isa import Access, Function, Instruction, Loop, registers, written

_PEER = re.compile(r"comm\.segment[1-9]\d*|target")  # kernel arguments that point into another rank's memory
_OWN = "comm.segment0"  # and the one that points to where peers write


def to_peer(access: Access) -> bool:
    return any(_PEER.fullmatch(origin) for origin in access.address)


def to_own_segment(access: Access) -> bool:
    return _OWN in access.address


def is_flag(access: Access) -> bool:
    """A signal word: 8 bytes to a peer that count this rank's calls. (Abort words are constants.)"""
    return access.kind == "store" and access.num_bytes == 8 and to_peer(access) and "*comm.state" in access.value


def is_data(access: Access) -> bool:
    """What was read from a user's tensor and goes to a peer."""
    return access.kind == "store" and to_peer(access) and "*source" in access.value


def polls(function: Function, found: Sequence[Access]) -> list[tuple[Loop, Access]]:
    """Every loop that loads the same word again and again until it changes, with that load."""
    loads = [access for access in found if access.kind == "load" and access.instruction.system]
    result = []
    for loop in function.loops:
        code = function.code_of(loop)
        changed = {register for instruction in code for register in written(instruction)}
        result += [(loop, one) for one in loads if one.instruction in code and not changed & _where(one.instruction)]
    return result


def _where(load: Instruction) -> set[str]:
    return {register for operand in load.operands[1:] for register in registers(operand)}


def staging_reads(function: Function, found: Sequence[Access]) -> list[Instruction]:
    """Reads of what peers wrote, other than the looks at a polled word."""
    polled = {access.instruction.operands[1:] for _, access in polls(function, found)}
    return [
        access.instruction
        for access in found
        if access.kind in ("load", "scalar")
        and to_own_segment(access)
        and access.instruction.operands[1:] not in polled
    ]


def flags_follow_a_barrier(function: Function, found: Sequence[Access], single_wave: bool) -> list[str]:
    """On every path to a flag, every wave waits for its own stores, then meets the block barrier, then one stores.

    Holds for paths from the entry too: the kernel around a primitive may have stores in flight. In a block of one wave
    the compiler leaves the barrier out.
    """
    flags = [access.instruction for access in found if is_flag(access)]
    data = {access.instruction for access in found if is_data(access)}
    met, waited, in_flight = 0, 1, 2

    def step(instruction: Instruction, state: int) -> int:
        if instruction in data:
            return in_flight
        if instruction.waits_for_stores():
            return min(state, waited)
        return met if instruction.is_barrier() and state == waited else state

    states = function.flow(in_flight, step, max)
    missing = {in_flight: "no s_waitcnt vmcnt(0)", waited: "no s_barrier after the wait for stores"}
    allowed = (met, waited) if single_wave else (met,)
    return [f"{missing[states[flag]]} before the flag at {flag}" for flag in flags if states[flag] not in allowed]


def flags_follow_a_release(function: Function, found: Sequence[Access]) -> list[str]:
    """For a flag that publishes what earlier kernels stored, in any memory: write back, wait, store the flag."""
    flags = [access.instruction for access in found if is_flag(access)]
    done, written_back, in_cache = 0, 1, 2

    def step(instruction: Instruction, state: int) -> int:
        if instruction.opcode == "buffer_wbl2" and instruction.system:
            return min(state, written_back)
        return done if instruction.waits_for_stores() and state == written_back else state

    states = function.flow(in_cache, step, max)
    return [f"no write-back and wait before the flag at {flag}" for flag in flags if states[flag] != done]


def polls_keep_the_caches(function: Function, found: Sequence[Access]) -> list[str]:
    """No invalidate and no write-back inside a poll loop: it would throw away what the wait should hide."""
    return [
        f"{instruction} is inside the loop that polls at {access.instruction}"
        for loop, access in polls(function, found)
        for instruction in function.code_of(loop)
        if instruction.opcode in ("buffer_inv", "buffer_wbl2")
    ]


def reads_follow_one_acquire(function: Function, found: Sequence[Access], single_wave: bool) -> list[str]:
    """After a poll one ``buffer_inv sc0 sc1``, never a second; then the block barrier; then reads of staging."""
    looks = {access.instruction.operands[1:] for _, access in polls(function, found)}
    looking = {one.instruction for one in found if one.kind == "load" and one.instruction.operands[1:] in looks}
    none, polled, acquired, met = (frozenset({name}) for name in ("none", "polled", "acquired", "met"))

    def step(instruction: Instruction, state: frozenset[str]) -> frozenset[str]:
        if instruction in looking:
            return polled
        if instruction.invalidates() and instruction.system and "polled" in state:
            return acquired
        if instruction.is_barrier() and "acquired" in state:
            return (state - acquired) | met
        return state

    states = function.flow(none, step, frozenset.union)
    wrong = []
    for read in staging_reads(function, found):
        if "polled" in states[read]:
            wrong.append(f"no acquire between the poll and {read}")
        elif "acquired" in states[read] and not single_wave:
            wrong.append(f"no barrier between the acquire and {read}")
    again = [i for i, state in states.items() if i.invalidates() and state & (acquired | met)]
    return wrong + [f"a second acquire at {instruction}" for instruction in again]


def peer_memory_is_not_cached(found: Sequence[Access]) -> list[str]:
    """What peers write, or is written to peers: never a scalar load, never a streaming or read-only access."""
    wrong = []
    for access in found:
        if not (to_peer(access) or to_own_segment(access)):
            continue
        if access.kind == "scalar":
            wrong.append(f"a scalar load of peer-written memory at {access.instruction}")
        elif "nt" in access.instruction.words:
            wrong.append(f"a streaming access to peer-mapped memory at {access.instruction}")
    return wrong


def peer_memory_is_at_system_scope(found: Sequence[Access]) -> list[str]:
    """Every vector access to what peers write, and every store to a peer, goes past the caches: ``sc0 sc1``."""
    return [
        f"not at system scope: {access.instruction}"
        for access in found
        if (to_peer(access) or to_own_segment(access))
        and access.kind in ("load", "store")
        and not access.instruction.system
    ]
