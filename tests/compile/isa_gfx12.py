# SPDX-License-Identifier: Apache-2.0
"""The assembly of gfx12 chips in the words of gfx9, so that one reader and one set of rules serve both.

What neither orders nor moves data is left out: hints, and waits for what the rules do not speak of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_SCOPES = {"scope:SCOPE_SYS": "sc0 sc1", "scope:SCOPE_DEV": "sc1", "scope:SCOPE_SE": "sc0"}
_SIZES = {"b32": "dword", "b64": "dwordx2", "b96": "dwordx3", "b128": "dwordx4", "b256": "dwordx8", "b512": "dwordx16"}
_SIZES |= dict.fromkeys(("u16", "i16", "b16"), "short") | dict.fromkeys(("u8", "i8", "b8"), "byte")
_NAMES = {"global_inv": "buffer_inv", "global_wb": "buffer_wbl2", "s_barrier_wait": "s_barrier"}
_NOTHING = ("s_delay_alu", "s_clause", "s_barrier_signal", "s_setreg", "v_nop", "global_prefetch")
_MOVED = re.compile(r"(global_load|global_store|s_load)(?:_d16(?:_hi)?)?_(\w+)")
_WIDE_ATOMIC = re.compile(r"(global_atomic_\w+)_[bui]64")


def is_gfx12(text: str) -> bool:
    return re.search(r'^\s*\.amdgcn_target ".*gfx12\d+"', text, re.MULTILINE) is not None


def translate(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Each instruction, label and directive, with the index of its line.

    Waits that follow each other are one: gfx12 counts loads and stores apart. Two instructions that are issued as one
    come one after the other.
    """
    waited: set[str] = set()
    for number, whole in enumerate(lines):
        line = whole.split(";")[0].strip()
        if line.startswith("s_wait_"):
            waited |= _waits(line)
            continue
        if line and waited:
            done = "vmcnt(0)" if {"loadcnt", "storecnt"} <= waited else " ".join(f"{one}(0)" for one in sorted(waited))
            yield number, f"s_waitcnt {done}"
            waited = set()
        if line and not line.startswith(_NOTHING):
            for one in line.split("::"):
                yield number, _instruction(one.strip()) if not line.startswith(".") else line


def _waits(line: str) -> set[str]:
    """The counters that are waited for down to zero."""
    name, count = line.split()
    return set(name.removeprefix("s_wait_").split("_")) if int(count, 0) == 0 else set()


def _instruction(text: str) -> str:
    name, *rest = text.split(None, 1)
    if moved := _MOVED.fullmatch(name):
        name = f"{moved[1]}_{_SIZES[moved[2]]}"
    elif wide := _WIDE_ATOMIC.fullmatch(name):
        name = f"{wide[1]}_x2"
    words = [_SCOPES.get(word, word) for word in rest[0].split()] if rest else []
    if name in ("s_barrier_wait", "global_inv", "global_wb"):
        words = [word for word in words if word.startswith("sc")]
    return " ".join([_NAMES.get(name, name), *words])
