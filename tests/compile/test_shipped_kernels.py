# SPDX-License-Identifier: Apache-2.0
"""Every shipped kernel for AMD GPUs: a loadable code object, within its registers, with PROTOCOLS' order in its code.

One test a kernel and chip, so that each is compiled once, however the tests are spread over processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import isa_rules as rules
import pytest
from build import Built, build, cases, needs_linker

from flycomm.compile import _elf
from flycomm.geometry import RESIDENT_THREADS
from flycomm.kernels import Specialization, all_reduce_pull
from flycomm.targets import CHIPS, EXECUTION_UNITS

pytestmark = needs_linker
FRAGMENT, PACKETS = 16, 32  # bytes of a fragment, as data and as packets
# LLVM's scheduler misses the limit of 128 registers by 17 that it keeps in scratch; told 112, it needs 105.
SPILLS = {("all_reduce_two_shot", 8, "f16", "gfx1250")}


@dataclass(frozen=True)
class Expected:
    """What a kernel's source says, for each peer but where noted."""

    flags: int = 0  # in all, if there are peers
    waits: int = 0  # in all, if there are peers
    pushed: int = 0  # bytes of a fragment to staging
    own_slot: int = 0  # bytes read for the own place among the terms, in all: of a peer's slot instead, and not used
    taken: int = 0  # bytes read from staging by a load
    pulled: int = 0  # bytes read from the peer's tensor
    marked: bool = False  # data that carries its own mark: no flags, no acquire
    scalars_spill_from: int = 9  # world size


EXPECTED = {
    "barrier": Expected(flags=1, waits=1),
    "put_signal": Expected(flags=1),
    "wait_signal": Expected(waits=1),
    "all_reduce_flags": Expected(1, 1, FRAGMENT, FRAGMENT, FRAGMENT, scalars_spill_from=8),
    "reduce_scatter_flags": Expected(1, 1, FRAGMENT, FRAGMENT, FRAGMENT, scalars_spill_from=5),
    "all_gather_flags": Expected(1, 1, FRAGMENT, FRAGMENT, FRAGMENT, scalars_spill_from=8),
    "all_reduce_two_shot": Expected(2, 2, 2 * FRAGMENT, FRAGMENT, 2 * FRAGMENT, scalars_spill_from=5),
    "all_reduce_pull": Expected(2, 2, pulled=FRAGMENT, scalars_spill_from=6),
    "all_reduce_pull_in_place": Expected(2, 2, pulled=all_reduce_pull._HELD * FRAGMENT, scalars_spill_from=5),
} | {
    f"{op}_{protocol}": Expected(pushed=size, taken=2 * size, marked=True, scalars_spill_from=4)  # a look, and polls
    for protocol, size, ops in (
        ("packets", PACKETS, ("all_reduce", "reduce_scatter", "all_gather")),
        ("sentinel", FRAGMENT, ("all_reduce", "reduce_scatter")),
    )
    for op in ops
}
SIGNALS = ("put_signal", "wait_signal")  # between two ranks, of which one may be the other


@pytest.mark.parametrize(("specialization", "arch"), cases())
def test_shipped(specialization: Specialization, arch: str):
    built = build(specialization, arch)
    expected = EXPECTED[specialization.kernel]
    _is_a_code_object(built, arch)
    _arguments_are_the_launchers(specialization, built)
    _fits_its_registers(specialization, expected, built)
    _holds_what_its_source_says(specialization, expected, built)
    assert _violations(specialization, expected, built) == []


def _is_a_code_object(built: Built, arch: str) -> None:
    code, kernel = built.code, built.launch.kernel
    assert built.data[:4] == b"\x7fELF"
    assert code.machine == _elf.EM_AMDGPU == 224
    assert (code.os_abi, code.abi_version) == (_elf.OSABI_HSA, _elf.ABI_V6)
    assert code.file_type == _elf.ET_DYN
    assert code.arch == arch

    descriptor, entry = code.symbols[f"{kernel}.kd"], code.symbols[kernel]
    assert descriptor.num_bytes == _elf.DESCRIPTOR_BYTES
    assert entry.num_bytes > 0
    assert code.entries[kernel] == entry.address  # the descriptor leads to the code
    assert entry.address % 256 == 0
    assert built.metadata[".symbol"] == f"{kernel}.kd"


def _arguments_are_the_launchers(specialization: Specialization, built: Built) -> None:
    s = specialization
    assert built.launch.block == (s.threads, 1, 1)
    assert built.launch.grid == (s.blocks, 1, 1)
    assert built.metadata[".reqd_workgroup_size"] == [s.threads, 1, 1]
    assert not [one for one in built.arguments if one["value_kind"].startswith("hidden")]

    peers = ["rank", "limit", "capacity", "state", "record", *(f"segment{j}" for j in range(s.world))]
    names = [argument["name"] for argument in built.arguments]
    assert names[: len(peers)] == [f"comm.{name}" for name in peers]
    assert None not in names
    end = 0
    sizes = {"i32": 4, "f32": 4, "i64": 8, "ptr": 8, "ptr<1>": 8}
    for argument in built.arguments:
        assert argument["size"] == sizes[argument["type"]]
        assert argument["offset"] == -(-end // argument["size"]) * argument["size"]  # naturally aligned, in order
        end = argument["offset"] + argument["size"]
    assert built.metadata[".kernarg_segment_size"] == end


def _fits_its_registers(specialization: Specialization, expected: Expected, built: Built) -> None:
    """A compute unit holds the threads that residency counts on, and nothing goes to memory.

    Scalars are the exception: a wave has 102 of them, whatever it is compiled for, and the addresses of many peers are
    more. They spill into lanes of vector registers, not into memory, and only in worlds of the size that is noted.
    """
    metadata, chip = built.metadata, CHIPS[built.code.arch]
    waves = RESIDENT_THREADS // (chip.wave * EXECUTION_UNITS)
    assert specialization.resident_threads == RESIDENT_THREADS
    assert metadata[".wavefront_size"] == chip.wave
    assert 0 < metadata[".vgpr_count"] <= chip.vector_registers // waves == 128
    assert metadata[".group_segment_fixed_size"] <= chip.lds_bytes
    if (specialization.kernel, specialization.world, specialization.dtype, built.code.arch) not in SPILLS:
        assert metadata[".private_segment_fixed_size"] == 0, "scratch memory"
        assert metadata[".vgpr_spill_count"] == 0
    assert not metadata[".uses_dynamic_stack"]
    if specialization.world < expected.scalars_spill_from:
        assert metadata[".sgpr_spill_count"] == 0


def _holds_what_its_source_says(specialization: Specialization, expected: Expected, built: Built) -> None:
    """So that no rule speaks about nothing: each kind of access is recognised, as often as the source has it."""
    function, found, peers = built.function, built.accesses, specialization.world - 1
    meets = peers > 0 or specialization.kernel in SIGNALS
    flags = [access for access in found if rules.is_flag(access)]
    assert len(flags) == (expected.flags if meets else 0)
    assert all(flag.instruction.system for flag in flags)
    waits = expected.waits if meets else 0
    assert sum(one.invalidates() for one in function.instructions()) == waits
    polled = [(loop.header, access) for loop, access in rules.polls(function, found)]
    looks = {header for header, access in polled if rules.is_look(access)}
    assert len(looks) >= 2 * waits, "polls, in a loop that looks at the clock"

    assert _num_bytes(found, rules.is_data) == expected.pushed * peers
    assert _num_bytes(found, rules.is_pull) == expected.pulled * peers
    taken = expected.taken * peers + (expected.own_slot if peers else 0)
    assert _num_bytes(found, rules.is_staging_read) == taken
    if expected.marked:
        words = {access.instruction for _, access in polled if rules.is_staging_read(access)}
        assert 8 * len(words) == expected.pushed * peers, "every word is polled"


def _num_bytes(found, kind) -> int:
    return sum(access.num_bytes for access in found if kind(access))


def _violations(specialization: Specialization, expected: Expected, built: Built) -> list[str]:
    function, found = built.function, built.accesses
    wrong = rules.peer_memory_is_not_cached(found) + rules.peer_memory_is_at_system_scope(found)
    wrong += rules.polls_keep_the_caches(function, found)
    if expected.marked:
        return wrong
    if specialization.kernel == "put_signal":
        wrong += rules.flags_follow_a_release(function, found)
    else:
        wrong += rules.flags_follow_a_barrier(function, found, built.single_wave)
    wrong += rules.data_precedes_a_flag(function, found)
    wrong += rules.reads_follow_one_acquire(function, found, built.single_wave)
    return wrong + rules.own_tensor_is_written_last(function, found)
