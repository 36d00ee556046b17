# SPDX-License-Identifier: Apache-2.0
"""Mono or separate: a pure function of what is equal on all ranks, with the reason in a sentence. No device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol

from flycomm.channel import MAX_WORLD
from flycomm.errors import UsageError
from flycomm.kernels import mono_attention_out, mono_ffn
from flycomm.kernels.mono_ffn import ROWS
from flycomm.validate import whole

_THREADS = 64  # any block that the kernels can have: a shape's faults do not depend on it


class Step(NamedTuple):
    """One forward pass, as the scheduler of an engine knows it; equal on all ranks.

    Every token is a row: a request's next one, its ``drafts``, and what pads a batch up to a captured graph. So one
    request with five drafts is six rows, and eight if the graph was captured with eight.
    """

    requests: int
    drafts: int = 0  # tokens of each request beside its last one, to be verified in this step
    padded: int = 0  # rows of the graph that will be replayed; 0: none, or not padded
    prefill: bool = False  # at least one request has its prompt, or a part of it, in this step

    @property
    def rows(self) -> int:
        """Token rows that the layer will see."""
        return max(self.requests * (1 + self.drafts), self.padded)

    def check(self) -> None:
        """Raise :class:`UsageError` for a step that cannot be."""
        if not whole(self.requests, self.drafts, self.padded):
            raise UsageError(f"{self} has what is no whole number; count requests, drafts of each, and padded rows")
        tokens = self.requests * (1 + self.drafts)
        if min(self.requests, self.drafts, self.padded) < 0:
            raise UsageError(f"{self} has a negative number; count requests, drafts of each, and padded rows from 0")
        if 0 < self.padded < tokens:
            raise UsageError(
                f"{tokens} rows do not fit a graph of {self.padded}; pass the padded rows of the whole step, drafts too"
            )


class Layout(Protocol):
    """The shape of one rank's part of a layer; its ``repr`` is what ranks compare."""

    kernel: str  # name in the dispatch table: "mono_ffn"
    hidden: int  # elements of a row
    inter: int

    def problem(self) -> str:
        """Why the mono kernel cannot do it, in a sentence; empty if it can."""


@dataclass(frozen=True)
class FfnLayout:
    """Of :mod:`flycomm.kernels.mono_ffn`; ``inter`` and ``out`` of one rank."""

    hidden: int
    inter: int
    out: int
    dtype: str = "bf16"
    kernel: str = field(default="mono_ffn", init=False)

    def problem(self) -> str:
        return _refusal(mono_ffn.Layer(self.hidden, self.inter, self.out, ROWS[0]), self.dtype)


@dataclass(frozen=True)
class AttentionOutLayout:
    """Of :mod:`flycomm.kernels.mono_attention_out`; ``inter``: its ``inner``, elements of one rank's heads."""

    hidden: int
    inter: int
    experts: int
    top_k: int
    router: str = "bf16"
    scoring: str = "softmax"
    dtype: str = "bf16"
    kernel: str = field(default="mono_attention_out", init=False)

    def problem(self) -> str:
        shape = self.hidden, self.inter, self.experts, self.top_k, ROWS[0], self.router, self.scoring
        return _refusal(mono_attention_out.Layer(*shape), self.dtype)


def _refusal(layer: mono_ffn.Layer | mono_attention_out.Layer, dtype: str) -> str:
    try:
        layer.check(dtype, _THREADS)
    except UsageError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Rule:
    """A cap: models and chips by pattern (``*`` and ``?``), numbers of ranks, and the most rows of a mono step."""

    rows: int  # 0: never
    model: str = "*"
    arch: str = "*"
    worlds: tuple[int, int] = (1, MAX_WORLD)

    def covers(self, model: str, arch: str, world: int) -> bool:
        return (
            fnmatchcase(model, self.model)
            and fnmatchcase(arch, self.arch)
            and self.worlds[0] <= world <= self.worlds[1]
        )


class Choice(NamedTuple):
    """``rows_class``: the most rows of the mono layer to call, 0 for the separate one; ``why`` in a sentence."""

    rows_class: int
    why: str


@dataclass(frozen=True)
class Chooser:
    """Everything that a choice depends on beside the step. Ranks whose choosers have the same ``repr`` choose alike."""

    model: str
    target: str
    arch: str
    world: int
    layout: Layout
    classes: tuple[int, ...]  # rows of the mono layers that there are, ascending
    rules: tuple[Rule, ...]  # the first that covers model, chip and world gives the cap; none: separate
    pays: int | None  # rows up to which mono pays, from the agreed table; None: not measured

    def limit(self) -> tuple[int, str]:
        """The most rows of a mono step, and what sets it."""
        if problem := self.layout.problem():
            return 0, problem
        rule = next((rule for rule in self.rules if rule.covers(self.model, self.arch, self.world)), None)
        place = f"model {self.model!r} on {self.target} {self.arch} with {self.world} ranks"
        if rule is None:
            return 0, f"no rule covers {place}"
        if not self.classes:
            return 0, f"there is no mono layer for {place}"
        limits = [(rule.rows, f"the cap for {place}"), (self.classes[-1], "the largest mono layer")]
        if self.pays is not None:
            limits.append((self.pays, "what pays by the dispatch table"))
        return min(limits, key=lambda one: one[0])

    def choose(self, step: Step) -> Choice:
        """The same on all ranks for the same step; raises :class:`UsageError` for a step that cannot be."""
        if not isinstance(step, Step):
            raise UsageError(f"{step!r} is not a Step; pass Step(requests=…), then the layer's arguments")
        step.check()
        rows = step.rows
        if step.prefill:
            return Choice(0, "separate: the step has prefill in it")
        if not rows:
            return Choice(0, "separate: the step has no rows")
        most, reason = self.limit()
        if rows > most:
            return Choice(0, f"separate: {rows} rows are over {most}, {reason}")
        rows_class = next(one for one in self.classes if one >= rows)
        parts = f"{step.requests} requests of {1 + step.drafts} tokens"
        padded = f", padded to {step.padded}" if step.padded else ""
        return Choice(rows_class, f"mono: {rows} rows ({parts}{padded}) by the layer of {rows_class}")

    def graph_rows(self) -> tuple[int, ...]:
        """Row counts worth a captured graph of the mono path, ascending: a step's rows are padded to the next.

        A layer computes all rows of its class, so within one no count is faster than another; the limit is one more
        where it lies between two classes.
        """
        most, _ = self.limit()
        return tuple(sorted({*(one for one in self.classes if one <= most), most} - {0})) if most > 0 else ()


def checked_rules(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """The rules, or :class:`UsageError` for what is none."""
    if not isinstance(rules, Sequence) or not all(
        isinstance(one, Rule) and whole(one.rows, *one.worlds) for one in rules
    ):
        raise UsageError(f"rules={rules!r} are not Rules of whole numbers; pass (Rule(rows=…), …)")
    return tuple(rules)


def checked_classes(classes: Sequence[int]) -> tuple[int, ...]:
    """The rows of mono layers, ascending; raises :class:`UsageError` for what is no number of rows."""
    for one in classes:
        if type(one) is not int or one < 1:
            raise UsageError(f"a mono layer of {one!r} rows; give each the most rows that it takes, such as {ROWS}")
    return tuple(sorted(set(classes)))
