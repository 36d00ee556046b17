# SPDX-License-Identifier: Apache-2.0
"""What a run is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flycomm.bench.collective import Collective
from flycomm.bench.harness import Method
from flycomm.bench.problem import Case
from flycomm.bench.subjects import SUBJECTS, Subject
from flycomm.kernels._topk_exchange_plan import RADIX_BLOCKS
from flycomm.targets import Target


@dataclass(frozen=True)
class Settings:
    target: Target
    collective: Collective
    cases: tuple[Case, ...]
    method: Method
    against: tuple[str, ...]  # names in baselines.REGISTRY
    explicit: bool  # whether the user named the baselines: then one that cannot run has rows all the same
    floors: bool
    timeout: float | None
    table: str | None  # path of the dispatch table, or "shipped"; None: the one in force
    fallback: str
    commit: str | None
    replay_on: str  # "own" | "default": the stream of graph replays
    command: dict[str, Any]  # option names to values
    json: Path | None

    @property
    def subject(self) -> Subject:
        return SUBJECTS[self.collective.name]

    @property
    def topk(self) -> tuple[int, int]:
        """The most rows that need a block each and the largest k of an exchange; zeros where nothing is exchanged."""
        exchanged = [(case.rows or 0, case.k or 0) for case in self.cases if case.exchange_mode]
        rows, ks = zip(*exchanged, strict=True) if exchanged else ((0,), (0,))
        return min(max(rows), RADIX_BLOCKS), max(ks)

    @property
    def sizes(self) -> list[int]:
        """Bytes of the messages: scores and caches are none."""
        return [case.num_bytes for case in self.cases if case.k is None and case.kind is None]
