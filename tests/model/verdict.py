# SPDX-License-Identifier: Apache-2.0
"""What tests say about a system."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from .checker import check
from .steps import System


def assert_right(system: System) -> None:
    """No interleaving has a fault or gets stuck."""
    outcome = check(system)
    assert not outcome.faults, str(outcome)


def assert_finds(system: System, fault: str) -> None:
    """Some interleaving ends in a fault whose message contains ``fault``."""
    outcome = check(system, until=fault)
    assert any(fault in message for message in outcome.faults), f"{fault!r} is not among: {outcome}"


def name(case: Any) -> str:
    """Of a test case, a dataclass: what is not the default."""
    changed = (field.name for field in fields(case) if getattr(case, field.name) != field.default)
    return ",".join(f"{word}={getattr(case, word)}" for word in changed) or "plain"
