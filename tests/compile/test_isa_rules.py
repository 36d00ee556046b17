# SPDX-License-Identifier: Apache-2.0
"""The order of PROTOCOLS in the instructions of every shipped kernel, and each rule shown to find its fault."""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
import isa_rules as rules
import pytest
from build import Built, build, build_launcher, cases, needs_linker
from isa import accesses, parse

from flycomm.kernels import SHIPPED, Specialization
from flycomm.primitives import access, rocm, signal

pytestmark = needs_linker
MARKED = {"all_reduce_packets": 4, "all_reduce_sentinel": 2}  # u64 a fragment and peer


@pytest.mark.parametrize(("specialization", "arch"), cases())
def test_rules(specialization: Specialization, arch: str):
    built = build(specialization, arch)
    function, found = built.function, built.accesses
    if specialization.kernel in MARKED:
        _marked_data_needs_no_order(specialization, built)
        return
    _is_not_vacuous(specialization, built)
    if specialization.kernel == "put_signal":
        assert rules.flags_follow_a_release(function, found) == []
    else:
        assert rules.flags_follow_a_barrier(function, found, built.single_wave) == []
    assert rules.polls_keep_the_caches(function, found) == []
    assert rules.reads_follow_one_acquire(function, found, built.single_wave) == []
    assert rules.peer_memory_is_not_cached(found) == []


@pytest.mark.parametrize(("specialization", "arch"), cases())
def test_peer_memory_is_at_system_scope(specialization: Specialization, arch: str):
    built = build(specialization, arch)
    if built.metadata[".sgpr_spill_count"]:
        pytest.skip("scalar registers spilled: the data flow of addresses cannot be followed through lanes")
    assert rules.peer_memory_is_at_system_scope(built.accesses) == []


def _marked_data_needs_no_order(specialization: Specialization, built: Built) -> None:
    """Packets and sentinels: 8-byte stores and polls at system scope, and no cache is thrown away for them."""
    halves = MARKED[specialization.kernel] * (specialization.world - 1)
    eight = [one.opcode for one in built.function.instructions() if one.system and one.opcode.endswith("dwordx2")]
    assert eight.count("global_store_dwordx2") >= halves
    assert eight.count("global_load_dwordx2") >= halves
    assert not any(one.invalidates() for one in built.function.instructions())


def _is_not_vacuous(specialization: Specialization, built: Built) -> None:
    """What the rules speak about is really found in the code."""
    kernel, peers = specialization.kernel, specialization.world - 1
    flags = [access for access in built.accesses if rules.is_flag(access)]
    assert all(flag.instruction.system for flag in flags)
    if peers or kernel == "put_signal":
        assert len(flags) == (0 if kernel == "wait_signal" else 1)
    if peers and kernel in ("barrier", "wait_signal", "all_reduce_one_shot"):
        assert rules.polls(built.function, built.accesses)
        assert sum(one.invalidates() for one in built.function.instructions()) == 1
    if kernel == "all_reduce_one_shot" and peers:
        assert sum(access.num_bytes for access in built.accesses if rules.is_data(access)) == 16 * peers
        assert rules.staging_reads(built.function, built.accesses)


# A flags exchange of two ranks by hand: push 16 bytes, signal, poll, read what the peer pushed.
_RIGHT = """
	.text
k:
	s_load_dwordx2 s[4:5], s[0:1], 0x0
	s_load_dwordx4 s[8:11], s[0:1], 0x8
	s_load_dwordx2 s[12:13], s[0:1], 0x18
	s_waitcnt lgkmcnt(0)
	s_load_dword s6, s[4:5], 0x0
	global_load_dwordx4 v[4:7], v0, s[12:13]
	s_waitcnt vmcnt(0)
	global_store_dwordx4 v0, v[4:7], s[10:11] offset:256 sc0 sc1
	s_waitcnt vmcnt(0)
	s_barrier
	s_and_saveexec_b64 s[14:15], vcc
	s_cbranch_execz .LBB0_3
	s_waitcnt lgkmcnt(0)
	v_mov_b32_e32 v2, s6
	global_store_dwordx2 v1, v[2:3], s[10:11] sc0 sc1
.LBB0_2:
	global_load_dwordx2 v[8:9], v1, s[8:9] sc0 sc1
	s_waitcnt vmcnt(0)
	v_cmp_gt_i32_e32 vcc, s6, v8
	s_cbranch_vccnz .LBB0_2
	buffer_inv sc0 sc1
.LBB0_3:
	s_or_b64 exec, exec, s[14:15]
	s_barrier
	global_load_dwordx4 v[12:15], v0, s[8:9] offset:256 sc0 sc1
	s_endpgm
.Lfunc_end0:
	.amdhsa_kernel k
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
	.end_amdhsa_kernel
"""
_ARGUMENTS = [
    {"name": name, "offset": 8 * index, "size": 8}
    for index, name in enumerate(("comm.state", "comm.segment0", "comm.segment1", "source"))
]
_STORE = "global_store_dwordx4 v0, v[4:7], s[10:11] offset:256 sc0 sc1\n"
_READ = "global_load_dwordx4 v[12:15], v0, s[8:9] offset:256 sc0 sc1\n"
_POLL = "global_load_dwordx2 v[8:9], v1, s[8:9] sc0 sc1\n"


def _violations(text: str) -> dict[str, list[str]]:
    function = parse(text)["k"]
    found = accesses(function, _ARGUMENTS)
    return {
        "barrier": rules.flags_follow_a_barrier(function, found, single_wave=False),
        "polls": rules.polls_keep_the_caches(function, found),
        "acquire": rules.reads_follow_one_acquire(function, found, single_wave=False),
        "cached": rules.peer_memory_is_not_cached(found),
        "scope": rules.peer_memory_is_at_system_scope(found),
    }


def test_the_right_code_has_no_violation():
    assert _violations(_RIGHT) == {"barrier": [], "polls": [], "acquire": [], "cached": [], "scope": []}


@pytest.mark.parametrize(
    ("right", "wrong", "rule", "sentence"),
    [
        (f"{_STORE}\ts_waitcnt vmcnt(0)\n", _STORE, "barrier", "no s_waitcnt vmcnt(0) before the flag"),
        ("\ts_waitcnt vmcnt(0)\n\ts_barrier\n", "\ts_barrier\n\ts_waitcnt vmcnt(0)\n", "barrier", "no s_barrier after"),
        ("\ts_barrier\n\ts_and_save", "\ts_and_save", "barrier", "no s_barrier after the wait for stores"),
        (f"{_STORE}\ts_waitcnt vmcnt(0)\n\ts_barrier\n", f"s_waitcnt vmcnt(0)\n\ts_barrier\n\t{_STORE}", "barrier", ""),
        (_POLL, f"{_POLL}\tbuffer_inv sc0 sc1\n", "polls", "inside the loop that polls"),
        ("\tbuffer_inv sc0 sc1\n", "", "acquire", "no acquire between the poll"),
        ("\tbuffer_inv sc0 sc1\n", "\tbuffer_inv sc1\n", "acquire", "no acquire between the poll"),
        ("\tbuffer_inv sc0 sc1\n", "\tbuffer_inv sc0 sc1\n" * 2, "acquire", "a second acquire"),
        (f"\ts_barrier\n\t{_READ}", f"\t{_READ}", "acquire", "no barrier between the acquire"),
        (_READ, "s_load_dwordx4 s[16:19], s[8:9], 0x100\n", "cached", "a scalar load of peer-written memory"),
        (_READ, _READ.replace("sc1", "sc1 nt"), "cached", "a streaming access"),
        (_STORE, _STORE.replace("sc1", "sc1 nt"), "cached", "a streaming access"),
        (_READ, _READ.replace(" sc0 sc1", ""), "scope", "not at system scope"),
        (_STORE, _STORE.replace(" sc0 sc1", " sc1"), "scope", "not at system scope"),
    ],
)  # fmt: skip
def test_each_rule_finds_its_fault(right: str, wrong: str, rule: str, sentence: str):
    assert _RIGHT.count(right) == 1
    found = _violations(_RIGHT.replace(right, wrong))
    assert any(sentence in one for one in found[rule])


def test_a_poll_loop_of_several_blocks_is_searched_whole():
    longer = f"{_POLL}\ts_cbranch_scc1 .LBB0_9\n\tbuffer_inv sc0 sc1\n.LBB0_9:\n"
    function = parse(_RIGHT.replace(_POLL, longer))["k"]
    assert [len(loop.blocks) for loop in function.loops] == [3]
    assert rules.polls_keep_the_caches(function, accesses(function, _ARGUMENTS))


def test_a_block_of_one_wave_needs_no_barrier():
    function = parse(_RIGHT.replace("\ts_barrier\n", ""))["k"]
    found = accesses(function, _ARGUMENTS)
    assert rules.flags_follow_a_barrier(function, found, single_wave=True) == []
    assert rules.reads_follow_one_acquire(function, found, single_wave=True) == []


def test_origins_follow_pointers_through_registers():
    found = accesses(parse(_RIGHT)["k"], _ARGUMENTS)
    assert [(one.kind, one.num_bytes, sorted(one.address), sorted(one.value)) for one in found] == [
        ("scalar", 4, ["comm.state"], []),
        ("load", 16, ["source"], []),
        ("store", 16, ["comm.segment1"], ["*source"]),
        ("store", 8, ["comm.segment1"], ["*comm.state"]),
        ("load", 8, ["comm.segment0"], []),
        ("load", 16, ["comm.segment0"], []),
    ]


def _two_ranks() -> Specialization:
    return next(one for one in SHIPPED if one.kernel == "all_reduce_one_shot" and one.world == 2)


def _rebuild(specialization: Specialization) -> Built:
    s = specialization
    launcher, placeholders = s.build(s.world, s.dtype, s.blocks, s.threads)
    return build_launcher(launcher, placeholders, "gfx950")


def test_a_signal_without_the_wait_of_every_wave_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rocm, "wait_own_stores", lambda: None)
    built = _rebuild(_two_ranks())
    assert rules.flags_follow_a_barrier(built.function, built.accesses, built.single_wave)


def test_an_acquire_in_every_poll_is_found(monkeypatch: pytest.MonkeyPatch):
    def load_acquire(address: Any, dtype: Any = fx.Uint64) -> Any:
        at = access.pointer(address, dtype, dtype.width // 8)
        return fx.generic_load(at, memory_order=fx.AtomicOrdering.Acquire)

    monkeypatch.setattr(signal, "load_relaxed", load_acquire)
    built = _rebuild(_two_ranks())
    assert rules.polls_keep_the_caches(built.function, built.accesses)
