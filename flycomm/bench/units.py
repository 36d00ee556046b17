# SPDX-License-Identifier: Apache-2.0
"""Sizes as people write them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from flycomm.errors import UsageError

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


def parse_bytes(text: str) -> int:
    """``"8KiB"`` to 8192. Units are B (or none), KiB, MiB and GiB; raises :class:`UsageError` for anything else."""
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found.group(2).upper()) if found else None
    if found is None or unit is None:
        raise UsageError(f"size {text!r} is not a number with B, KiB, MiB or GiB; write for example 512, 8KiB or 1MiB")
    exact = float(found.group(1)) * unit
    if exact != int(exact) or exact < 1:
        raise UsageError(f"size {text!r} is {exact:g} bytes; give a whole number of bytes, at least 1")
    return int(exact)


def format_bytes(num_bytes: int) -> str:
    """8192 to ``"8 KiB"``: in the largest unit that divides it, as :func:`parse_bytes` reads."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit and num_bytes % unit == 0:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes} B"


def parse_list(text: str) -> list[str]:
    """The words of a comma-separated list, in order, without repeats and blanks."""
    return unique(word.strip() for word in text.split(",") if word.strip())


def parse_counts(text: str, name: str) -> list[int]:
    """The whole numbers of a comma-separated list, each at least 1; ``name`` is what they count, for the message."""
    for word in parse_list(text):
        if not word.isdecimal() or int(word) < 1:
            raise UsageError(f"--{name} {word} is not a whole number of at least 1; give for example 1,16")
    return [int(word) for word in parse_list(text)]


def unique(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))
