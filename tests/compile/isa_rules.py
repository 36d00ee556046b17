# SPDX-License-Identifier: Apache-2.0
"""What the rules of docs/memory_model.md look like in compiled AMD code. Each returns the violations, as sentences.

Addresses are told apart by the kernel arguments that they are computed from: a place in staging depends on the size of
a staging slot (``comm.capacity``), a signal or abort word does not. A kernel may make several calls of a channel, and
loop over them, so a rule says what holds on every path to an instruction, not how often an instruction occurs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from isa import Access, Function, Instruction, Loop, registers

_PEER = re.compile(r"comm\.segment[1-9]\d*|target")  # kernel arguments that point into another rank's segment
_PULLED = re.compile(r"memory\.address[1-9]\d*")  # and into its tensor
_OWN = "comm.segment0"  # where peers write
_OWN_TENSOR = "memory.address0"  # where peers read
_STAGING = "comm.capacity"

_OPEN, _WAITED, _MET = "open", "waited", "met"  # a block on its way to a flag
_Way = frozenset[tuple[str, bool]]  # how far it may have come, and whether data waits for a flag


def to_peer(access: Access) -> bool:
    return any(_PEER.fullmatch(origin) for origin in access.address)


def to_own_segment(access: Access) -> bool:
    return _OWN in access.address


def is_pull(access: Access) -> bool:
    """A read of a peer's tensor where it lies."""
    return access.kind in ("load", "scalar") and any(_PULLED.fullmatch(origin) for origin in access.address)


def is_flag(access: Access) -> bool:
    """A signal word: 8 bytes to a peer's pad that count this rank's calls. (Abort words are constants.)"""
    pad = to_peer(access) and _STAGING not in access.address
    return access.kind == "store" and access.num_bytes == 8 and pad and "*comm.state" in access.value


def is_data(access: Access) -> bool:
    """What goes to a peer's staging."""
    return access.kind == "store" and to_peer(access) and _STAGING in access.address


def is_look(access: Access) -> bool:
    """A read of a word of the own pad: a signal or the abort word."""
    return access.kind in ("load", "scalar") and to_own_segment(access) and _STAGING not in access.address


def is_staging_read(access: Access) -> bool:
    """A read of what peers pushed."""
    return access.kind in ("load", "scalar") and to_own_segment(access) and _STAGING in access.address


def polls(function: Function, found: Sequence[Access]) -> list[tuple[Loop, Access]]:
    """Every loop that loads the same word again and again until it changes, with that load.

    Such a loop does nothing else that others see: no store, no block barrier. So a loop over the pieces of a message
    is none, although it comes back to the same word too.
    """
    loads = [access for access in found if access.kind == "load" and access.instruction.system]
    changing = {access.instruction for access in found if access.kind in ("store", "atomic")}
    result = []
    for loop in function.loops:
        code = function.code_of(loop)
        if any(one in changing or one.is_barrier() for one in code):
            continue
        changed = {register for instruction in code if not instruction.reloads() for register in instruction.written}
        result += [(loop, one) for one in loads if one.instruction in code and not changed & _where(one.instruction)]
    return result


def _where(load: Instruction) -> set[str]:
    return {register for operand in load.operands[1:] for register in registers(operand)}


def flags_follow_a_barrier(function: Function, found: Sequence[Access], single_wave: bool) -> list[str]:
    """On every path to a flag, every wave waits for its own accesses, then meets the block barrier, then one stores.

    Each flag has a wait and a barrier of its own, since the block barrier after the flag before it: that one is the
    other half of a meeting, and ends the acquire. Holds for paths from the entry too: the kernel around a primitive may
    have stores in flight. Reads of what peers wrote or will write count as accesses: the flag tells that they are over.
    In a block of one wave the compiler leaves the barriers out.
    """
    flags = [access.instruction for access in found if is_flag(access)]
    states = _ways(function, found)
    missing = {_OPEN: "no s_waitcnt vmcnt(0)", _WAITED: "no s_barrier after the wait for stores"}
    allowed = (_MET, _WAITED) if single_wave else (_MET,)
    return [
        f"{missing[level]} before the flag at {flag}"
        for flag in flags
        for level in sorted({level for level, _ in states[flag]} - set(allowed))
    ]


def data_precedes_a_flag(function: Function, found: Sequence[Access]) -> list[str]:
    """No data between the barrier of a flag and the next one, and none that no flag follows."""
    states = _ways(function, found)
    late = [
        f"data after the barrier of its flag: {access.instruction}"
        for access in found
        if is_data(access) and any(level == _MET for level, _ in states[access.instruction])
    ]
    ends = [one for one in function.instructions() if one.opcode == "s_endpgm" and one in states]
    return late + [f"data that no flag follows before {end}" for end in ends if any(data for _, data in states[end])]


def _ways(function: Function, found: Sequence[Access]) -> dict[Instruction, _Way]:
    data = {access.instruction for access in found if is_data(access)}
    reads = {access.instruction for access in found if is_staging_read(access) or is_pull(access)}

    def step(instruction: Instruction, state: _Way) -> _Way:
        if instruction in data:
            return frozenset({(_OPEN, True)})
        if instruction in reads:
            return frozenset((_OPEN, data) for _, data in state)
        if instruction.waits():
            return frozenset((_WAITED if level == _OPEN else level, data) for level, data in state)
        return frozenset(map(_meet, state)) if instruction.is_barrier() else state

    return function.flow(frozenset({(_OPEN, False)}), step, frozenset.union)


def _meet(way: tuple[str, bool]) -> tuple[str, bool]:
    """A block barrier: the one before a flag if every wave has waited, or the one after it."""
    level, data = way
    return (_MET, False) if level == _WAITED else (_OPEN, data)


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
    """After a poll one ``buffer_inv sc0 sc1``, no second; then the block barrier; then reads of what peers wrote."""
    looks = {access.instruction for access in found if is_look(access)}
    none, polled, acquired, met = (frozenset({name}) for name in ("none", "polled", "acquired", "met"))

    def step(instruction: Instruction, state: frozenset[str]) -> frozenset[str]:
        if instruction in looks:
            return polled
        if instruction.invalidates() and instruction.system and "polled" in state:
            return acquired
        if instruction.is_barrier() and "acquired" in state:
            return (state - acquired) | met
        return state

    states = function.flow(none, step, frozenset.union)
    wrong = []
    for read in (access.instruction for access in found if is_staging_read(access) or is_pull(access)):
        if "polled" in states[read]:
            wrong.append(f"no acquire between the poll and {read}")
        elif "acquired" in states[read] and not single_wave:
            wrong.append(f"no barrier between the acquire and {read}")
    again = [i for i, state in states.items() if i.invalidates() and state & (acquired | met)]
    return wrong + [f"a second acquire at {instruction}" for instruction in again]


def own_tensor_is_written_last(function: Function, found: Sequence[Access]) -> list[str]:
    """A tensor that peers read is written only between a meeting that follows the own reads of it and the next read.

    A meeting is two block barriers: before the flag, and after the acquire.
    """
    reads = {access.instruction for access in found if is_pull(access)}
    after = {"read": "arrived", "arrived": "met", "met": "met"}

    def step(instruction: Instruction, state: frozenset[str]) -> frozenset[str]:
        if instruction in reads:
            return frozenset({"read"})
        return frozenset(after[one] for one in state) if instruction.is_barrier() else state

    states = function.flow(frozenset({"read"}), step, frozenset.union)
    return [
        f"peers may still read what is written at {access.instruction}"
        for access in found
        if access.kind == "store" and _OWN_TENSOR in access.address and states[access.instruction] != {"met"}
    ]


def peer_memory_is_not_cached(found: Sequence[Access]) -> list[str]:
    """What peers write, or is written to peers: never a scalar load, never a streaming or read-only access."""
    wrong = []
    for access in found:
        if not _is_shared(access):
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
        if _is_shared(access) and access.kind in ("load", "store") and not access.instruction.system
    ]


def _is_shared(access: Access) -> bool:
    return to_peer(access) or to_own_segment(access) or is_pull(access)
