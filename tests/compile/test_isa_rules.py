# SPDX-License-Identifier: Apache-2.0
"""Each rule of ``isa_rules.py`` is shown to find its fault: in code by hand, and in kernels that are broken on purpose.

That shipped kernels keep the rules is tested in ``test_shipped_kernels.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flydsl.expr as fx
import isa_rules as rules
import pytest
from build import Built, build_launcher, needs_linker
from isa import accesses, parse

from flycomm.kernels import SHIPPED, _protocols, all_reduce_one_shot
from flycomm.primitives import access, fragment, packet, rocm, signal
from flycomm.primitives.call import again

pytestmark = needs_linker

# A flags exchange of two ranks by hand: push 16 bytes, signal, poll, read what the peer pushed.
_RIGHT = """
	.text
k:
	s_load_dwordx2 s[4:5], s[0:1], 0x0
	s_load_dwordx4 s[8:11], s[0:1], 0x8
	s_load_dwordx4 s[12:15], s[0:1], 0x18
	s_waitcnt lgkmcnt(0)
	s_load_dword s6, s[4:5], 0x0
	s_add_u32 s16, s8, s14
	s_addc_u32 s17, s9, s15
	s_add_u32 s18, s10, s14
	s_addc_u32 s19, s11, s15
.LBB0_1:
	global_load_dwordx4 v[4:7], v0, s[12:13]
	s_waitcnt vmcnt(0)
	global_store_dwordx4 v0, v[4:7], s[18:19] offset:256 sc0 sc1
	s_waitcnt vmcnt(0)
	s_barrier
	s_and_saveexec_b64 s[20:21], vcc
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
	s_or_b64 exec, exec, s[20:21]
	s_barrier
	global_load_dwordx4 v[12:15], v0, s[16:17] offset:256 sc0 sc1
	s_endpgm
.Lfunc_end0:
	.amdhsa_kernel k
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
	.end_amdhsa_kernel
"""
# The same, but its own tensor is read by the peer, and written once both have read.
_PULL = (
    _RIGHT.replace("global_load_dwordx4 v[4:7], v0, s[12:13]\n", "s_nop 0\n")
    .replace("global_store_dwordx4 v0, v[4:7], s[18:19] offset:256", "global_load_dwordx4 v[4:7], v0, s[18:19]")
    .replace(
        "global_load_dwordx4 v[12:15], v0, s[16:17] offset:256 sc0 sc1", "global_store_dwordx4 v0, v[4:7], s[12:13]"
    )
    .replace("s_add_u32 s18, s10, s14\n\ts_addc_u32 s19, s11, s15", "s_mov_b64 s[18:19], s[14:15]")
)
_NAMES = ("comm.state", "comm.segment0", "comm.segment1", "source", "comm.capacity")
_PULL_NAMES = (*_NAMES[:3], "memory.address0", "memory.address1")
_STORE = "global_store_dwordx4 v0, v[4:7], s[18:19] offset:256 sc0 sc1\n"
_FLAG = "global_store_dwordx2 v1, v[2:3], s[10:11] sc0 sc1\n"
_READ = "global_load_dwordx4 v[12:15], v0, s[16:17] offset:256 sc0 sc1\n"
_POLL = "global_load_dwordx2 v[8:9], v1, s[8:9] sc0 sc1\n"
_PULLED = "global_load_dwordx4 v[4:7], v0, s[18:19] sc0 sc1\n"
_WRITE = "global_store_dwordx4 v0, v[4:7], s[12:13]\n"
_WAIT, _BARRIER, _ACQUIRE, _END = "\ts_waitcnt vmcnt(0)\n", "\ts_barrier\n", "\tbuffer_inv sc0 sc1\n", "\ts_endpgm\n"


def _arguments(names: Sequence[str]) -> list[dict[str, Any]]:
    return [{"name": name, "offset": 8 * index, "size": 8} for index, name in enumerate(names)]


def _in_pieces(text: str) -> str:
    """The same in a loop, as for the pieces of a long message."""
    return text.replace(_END, f"\ts_cbranch_scc0 .LBB0_1\n{_END}")


def _violations(text: str, names: Sequence[str] = _NAMES) -> dict[str, list[str]]:
    function = parse(text)["k"]
    return _all_rules(function, accesses(function, _arguments(names)), single_wave=False)


def _all_rules(function: Any, found: Any, single_wave: bool) -> dict[str, list[str]]:
    return {
        "barrier": rules.flags_follow_a_barrier(function, found, single_wave),
        "data": rules.data_precedes_a_flag(function, found),
        "polls": rules.polls_keep_the_caches(function, found),
        "acquire": rules.reads_follow_one_acquire(function, found, single_wave),
        "last": rules.own_tensor_is_written_last(function, found),
        "cached": rules.peer_memory_is_not_cached(found),
        "scope": rules.peer_memory_is_at_system_scope(found),
    }


@pytest.mark.parametrize("loop", [str, _in_pieces])
def test_the_right_code_has_no_violation(loop: Any):
    assert not any(_violations(loop(_RIGHT)).values())
    assert not any(_violations(loop(_PULL), _PULL_NAMES).values())


@pytest.mark.parametrize("loop", [str, _in_pieces])
@pytest.mark.parametrize(
    ("right", "wrong", "rule", "sentence"),
    [
        (f"{_STORE}{_WAIT}", _STORE, "barrier", "no s_waitcnt vmcnt(0) before the flag"),
        (f"{_WAIT}{_BARRIER}", f"{_BARRIER}{_WAIT}", "barrier", "no s_barrier after the wait"),
        (f"{_BARRIER}\ts_and_save", "\ts_and_save", "barrier", "no s_barrier after the wait"),
        (f"{_STORE}{_WAIT}{_BARRIER}", f"s_nop 0\n{_WAIT}{_BARRIER}\t{_STORE}", "barrier", "no s_waitcnt"),
        (f"{_STORE}{_WAIT}{_BARRIER}", f"s_nop 0\n{_WAIT}{_BARRIER}\t{_STORE}", "data", "data after the barrier"),
        (_FLAG, f"{_FLAG}\t{_STORE}", "data", "data after the barrier of its flag"),
        (_READ, f"{_READ}\t{_STORE}", "data", "data that no flag follows"),
        (_READ, f"{_READ}\t{_STORE}{_WAIT}", "data", "data that no flag follows"),
        (_END, f"\t{_FLAG}{_END}", "barrier", "no s_waitcnt vmcnt(0) before the flag"),
        (_END, f"{_WAIT}\t{_FLAG}{_END}", "barrier", "no s_barrier after the wait"),
        (_POLL, f"{_POLL}{_ACQUIRE}", "polls", "inside the loop that polls"),
        (_POLL, f"{_POLL}\tbuffer_wbl2 sc0 sc1\n", "polls", "inside the loop that polls"),
        (_ACQUIRE, "", "acquire", "no acquire between the poll"),
        (_ACQUIRE, "\tbuffer_inv sc1\n", "acquire", "no acquire between the poll"),
        (_ACQUIRE, _ACQUIRE * 2, "acquire", "a second acquire"),
        (f"{_BARRIER}\t{_READ}", f"\t{_READ}", "acquire", "no barrier between the acquire"),
        (_READ, "s_load_dwordx4 s[24:27], s[16:17], 0x100\n", "cached", "a scalar load of peer-written memory"),
        (_READ, _READ.replace("sc1", "sc1 nt"), "cached", "a streaming access"),
        (_STORE, _STORE.replace("sc1", "sc1 nt"), "cached", "a streaming access"),
        (_READ, _READ.replace(" sc0 sc1", ""), "scope", "not at system scope"),
        (_STORE, _STORE.replace(" sc0 sc1", " sc1"), "scope", "not at system scope"),
    ],
)  # fmt: skip
def test_each_rule_finds_its_fault(right: str, wrong: str, rule: str, sentence: str, loop: Any):
    _finds(_RIGHT, _NAMES, right, wrong, rule, sentence, loop)


@pytest.mark.parametrize("loop", [str, _in_pieces])
@pytest.mark.parametrize(
    ("right", "wrong", "rule", "sentence"),
    [
        (f"{_PULLED}{_WAIT}", _PULLED, "barrier", "no s_waitcnt vmcnt(0) before the flag"),
        (_FLAG, f"{_FLAG}\t{_WRITE}", "last", "peers may still read"),
        (_PULLED, f"{_PULLED}\t{_WRITE}", "last", "peers may still read"),
        (_WRITE, f"{_PULLED}\t{_WRITE}", "last", "peers may still read"),
        (_POLL, f"{_POLL}\t{_PULLED}", "acquire", "no acquire between the poll"),
        (_PULLED, "s_load_dwordx4 s[24:27], s[18:19], 0x0\n", "cached", "a scalar load of peer-written memory"),
        (_PULLED, _PULLED.replace(" sc0 sc1", ""), "scope", "not at system scope"),
        (_PULLED, _PULLED.replace("sc1", "sc1 nt"), "cached", "a streaming access"),
    ],
)  # fmt: skip
def test_each_rule_finds_its_fault_in_a_pull(right: str, wrong: str, rule: str, sentence: str, loop: Any):
    _finds(_PULL, _PULL_NAMES, right, wrong, rule, sentence, loop)


def _finds(text: str, names: Sequence[str], right: str, wrong: str, rule: str, sentence: str, loop: Any) -> None:
    assert text.count(right) == 1
    found = _violations(loop(text.replace(right, wrong)), names)
    assert any(sentence in one for one in found[rule])


def test_a_poll_loop_of_several_blocks_is_searched_whole():
    longer = f"{_POLL}\ts_cbranch_scc1 .LBB0_9\n{_ACQUIRE}.LBB0_9:\n"
    function = parse(_RIGHT.replace(_POLL, longer))["k"]
    assert [len(loop.blocks) for loop in function.loops] == [3]
    assert rules.polls_keep_the_caches(function, accesses(function, _arguments(_NAMES)))


def test_a_loop_over_pieces_is_no_poll():
    function = parse(_in_pieces(_RIGHT))["k"]
    found = accesses(function, _arguments(_NAMES))
    assert len(function.loops) == 2
    ((loop, access),) = rules.polls(function, found)
    assert (len(loop.blocks), rules.is_look(access)) == (1, True)


def test_a_block_of_one_wave_needs_no_barrier():
    function = parse(_RIGHT.replace(_BARRIER, ""))["k"]
    found = accesses(function, _arguments(_NAMES))
    assert rules.flags_follow_a_barrier(function, found, single_wave=True) == []
    assert rules.reads_follow_one_acquire(function, found, single_wave=True) == []


def test_origins_follow_pointers_through_registers():
    found = accesses(parse(_RIGHT)["k"], _arguments(_NAMES))
    assert [(one.kind, one.num_bytes, sorted(one.address), sorted(one.value)) for one in found] == [
        ("scalar", 4, ["comm.state"], []),
        ("load", 16, ["source"], []),
        ("store", 16, ["comm.capacity", "comm.segment1"], ["*source"]),
        ("store", 8, ["comm.segment1"], ["*comm.state"]),
        ("load", 8, ["comm.segment0"], []),
        ("load", 16, ["comm.capacity", "comm.segment0"], []),
    ]


def test_origins_follow_spilled_scalars_each_in_its_lane():
    spilled = """
	v_writelane_b32 v40, s8, 0
	v_writelane_b32 v40, s9, 1
	v_writelane_b32 v40, s12, 2
	s_mov_b64 s[8:9], 0
	v_readlane_b32 s24, v40, 0
	v_readlane_b32 s25, v40, 1
	v_readlane_b32 s26, v40, 2
	v_mov_b32_e32 v40, 0
	v_readlane_b32 s27, v40, 2
	global_load_dword v41, v1, s[24:25]
	global_load_dword v41, v1, s[26:27]
	global_load_dword v41, v1, s[27:28]
"""
    text = _RIGHT.replace(_END, f"{spilled}{_END}")
    found = accesses(parse(text)["k"], _arguments(_NAMES))
    assert [sorted(one.address) for one in found[-3:]] == [["comm.segment0"], ["source"], []]


def test_vcc_holds_scalars_too():
    text = _RIGHT.replace("v_mov_b32_e32 v2, s6", "s_mov_b32 vcc_lo, s6\n\tv_mov_b32_e32 v2, vcc_lo")
    found = accesses(parse(text)["k"], _arguments(_NAMES))
    assert any(rules.is_flag(one) for one in found)


# Kernels that are broken on purpose.


def _rebuild(kernel: str, world: int = 2) -> Built:
    s = next(one for one in SHIPPED if (one.kernel, one.world) == (kernel, world))
    launcher, placeholders = s.build(s.world, s.dtype, s.blocks, s.threads)
    return build_launcher(launcher, placeholders, "gfx950")


def _found(kernel: str, world: int = 2) -> dict[str, list[str]]:
    """The rules that a kernel breaks, with what they say."""
    built = _rebuild(kernel, world)
    found = _all_rules(built.function, built.accesses, built.single_wave)
    return {rule: sentences for rule, sentences in found.items() if sentences}


@pytest.mark.parametrize("kernel", ["all_reduce_flags", "all_reduce_pull_in_place", "all_gather_flags"])
def test_a_signal_without_the_wait_of_every_wave_is_found(kernel: str, monkeypatch: pytest.MonkeyPatch):
    assert not _found(kernel)
    monkeypatch.setattr(rocm, "wait_own_stores", lambda: None)
    assert _found(kernel)["barrier"]


def test_a_second_phase_without_the_wait_of_every_wave_is_found(monkeypatch: pytest.MonkeyPatch):
    """The first phase's is not needed in this code: the compiler waits there, for registers that it fills again."""
    calls = []
    wait = rocm.wait_own_stores

    def wait_once() -> None:
        calls.append(None)
        if len(calls) == 1:
            wait()

    monkeypatch.setattr(rocm, "wait_own_stores", wait_once)
    built = _rebuild("all_reduce_two_shot", 3)
    _, second = sorted(one.instruction.line for one in built.accesses if rules.is_flag(one))
    found = rules.flags_follow_a_barrier(built.function, built.accesses, built.single_wave)
    assert any("no s_waitcnt vmcnt(0)" in one and f"line {second}" in one for one in found)
    assert len(calls) == 2


@pytest.mark.parametrize("kernel", ["all_reduce_flags", "all_reduce_pull"])
def test_an_acquire_in_every_poll_is_found(kernel: str, monkeypatch: pytest.MonkeyPatch):
    def load_acquire(address: Any, dtype: Any = fx.Uint64) -> Any:
        at = access.pointer(address, dtype, dtype.width // 8)
        return fx.generic_load(at, memory_order=fx.AtomicOrdering.Acquire)

    monkeypatch.setattr(signal, "load_relaxed", load_acquire)
    assert "inside the loop that polls" in _found(kernel)["polls"][0]


def test_packets_that_a_cache_may_hold_are_found(monkeypatch: pytest.MonkeyPatch):
    def load_pair(address: Any) -> Any:
        return [access.load_element(address + fx.Int64(8 * half), fx.Uint64) for half in range(2)]

    monkeypatch.setattr(packet, "load_pair", load_pair)
    assert "not at system scope" in _found("all_gather_packets")["scope"][0]


@pytest.mark.parametrize("kernel", ["all_reduce_pull", "all_reduce_pull_in_place", "all_gather_flags"])
def test_reads_that_a_cache_may_answer_are_found(kernel: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(rocm, "pull_fragment")
    assert "not at system scope" in _found(kernel)["scope"][0]


def test_pushes_that_a_cache_may_keep_are_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(rocm, "push_fragment")
    assert "not at system scope" in _found("all_reduce_flags")["scope"][0]


@pytest.mark.parametrize(
    ("after_wait", "sentence"), [(False, "after the barrier of its flag"), (True, "no flag follows")]
)
def test_data_that_is_pushed_after_the_flag_is_found(after_wait: bool, sentence: str, monkeypatch: pytest.MonkeyPatch):
    def exchange(protocol: str, call: Any, share: Any, post: Any, take: Any) -> None:
        def piece(epoch: Any, ok: Any, last: Any, base: Any, n: Any) -> Any:
            one = again(call, epoch, ok, last)
            fragment.arrive(one)
            if not after_wait:
                post(one, base, n)
            fragment.wait(one)
            if after_wait:
                post(one, base, n)
            take(one, base, n)
            return one.epoch, one.ok, one.found

        _protocols.in_pieces(call, share.fragments, _protocols.fragments_of_a_slot(call), piece)

    monkeypatch.setattr(all_reduce_one_shot, "exchange", exchange)
    assert any(sentence in one for one in _found("all_reduce_flags")["data"])
