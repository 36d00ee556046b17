# SPDX-License-Identifier: Apache-2.0
"""``Runner``: what an engine holds of a layer that exists twice, as one mono launch and as separate kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flycomm import targets
from flycomm.communicator import Communicator
from flycomm.errors import UsageError
from flycomm.mono.choice import Choice, Chooser, Layout, Rule, Step, checked_classes, checked_rules

Call = Callable[..., Any]  # returns a tensor, or a tuple of tensors
_KEPT = 4096  # different steps whose choice is kept ready


class Runner:
    """Mono or separate, the same on every rank, for all layers of a model that have one shape::

        mono = {rows: FfnLayer(comm, "ffn", Layer(6144, 1024, 2048, rows)) for rows in (1, 2, 4)}
        runner = Runner(comm, "my-model", FfnLayout(6144, 1024, 2048), mono, separate, rules=(Rule(rows=4),))
        for rows in runner.graph_rows():  # a captured graph each; other steps are padded to the next
            ...
        out, residual = runner(Step(requests=1, drafts=3), x, residual, gate_up, down, norm_weight, projection)

    ``model``: a name for the rules. ``layout``: one rank's shape (:class:`~flycomm.mono.choice.FfnLayout`). ``mono``:
    rows → what does a step of up to so many rows in one launch; ``separate`` does any step; both take the same
    arguments, leave them as they are, and return a tensor or a tuple of tensors. ``rules``: caps by model, chip and
    world (:class:`~flycomm.mono.choice.Rule`), the first that covers decides. Where the communicator's dispatch table
    has measured up to how many rows mono pays at this shape, that is a limit too.

    Collective to make: ranks vote on all of this, and :class:`DisagreementError` names both sides if they differ.
    Calls are collective as those of the two forms are. What is chosen depends on the agreed values and the step alone;
    in debug mode (``init(debug=True)``, ``FLYCOMM_DEBUG``) ranks compare step and choice at every call.

    ``check_first``: the first mono result of every class is compared with the separate one: at most ``tolerance`` times
    the largest element of the separate result apart, in every tensor, on every rank. Ranks vote; if one says no, all
    use the separate form from then on, for every class, and log one sentence. That call waits for the device, the
    others do not: choosing costs a look into a dict.
    """

    def __init__(
        self,
        comm: Communicator,
        model: str,
        layout: Layout,
        mono: Mapping[int, Call],
        separate: Call,
        *,
        rules: Sequence[Rule] = (Rule(rows=16),),
        check_first: bool = False,
        tolerance: float = 2**-6,
    ):
        if not all(hasattr(layout, name) for name in ("kernel", "hidden", "inter", "problem")):
            raise UsageError(f"layout={layout!r} is no layout; pass a FfnLayout or an AttentionOutLayout")
        if not isinstance(mono, Mapping) or not all(map(callable, (separate, *mono.values()))):
            raise UsageError("mono is not a dict of calls, or separate not a call; pass {rows: layer}, and a function")
        rules = checked_rules(rules)
        if not isinstance(tolerance, float | int) or not tolerance > 0:
            raise UsageError(
                f"tolerance={tolerance!r} is not over 0; pass a share of the largest element, such as 2**-6"
            )
        classes = checked_classes(tuple(mono))
        arch = targets.active().capabilities(comm.device.index or 0).arch
        pays = comm.table.pays_up_to(layout.kernel, comm.world_size, layout.hidden, layout.inter)
        self.chooser = Chooser(model, comm.target, arch, comm.world_size, layout, classes, rules, pays)
        self._check_first = check_first
        self._tolerance = tolerance
        self._session = comm._session
        self._session.world.agree(repr((self.chooser, check_first, tolerance)).encode(), f"the mono runner of {model}")
        self._mono = dict(mono)
        self._separate = separate
        self._checked: set[int] = set()
        self._refused = ""
        self._choices: dict[Step, Choice] = {}

    def choose(self, step: Step) -> Choice:
        """What a call would do; the same on all ranks. Launches nothing."""
        if self._refused:
            return Choice(0, f"separate: {self._refused}")
        found = self._choices.get(step)
        if found is None:
            if len(self._choices) >= _KEPT:
                self._choices.clear()
            found = self._choices[step] = self.chooser.choose(step)
        return found

    def why(self, step: Step) -> str:
        """The choice for a step, with its reason, in a sentence."""
        return self.choose(step).why

    def graph_rows(self) -> tuple[int, ...]:
        """Row counts to capture a mono graph for, ascending; empty where mono is never chosen."""
        return () if self._refused else self.chooser.graph_rows()

    def __call__(self, step: Step, *arguments: Any, **named: Any) -> Any:
        """One step of the layer, by the form that :meth:`choose` names; returns what that returns."""
        chosen = self.choose(step)
        if self._session.debug:
            self._session.roll_call(f"mono runner of {self.chooser.model}", chosen.why, tuple(step), "")
        if not chosen.rows_class:
            return self._separate(*arguments, **named)
        mono = self._mono[chosen.rows_class]
        if self._check_first and chosen.rows_class not in self._checked:
            return self._first(chosen.rows_class, mono, arguments, named)
        return mono(*arguments, **named)

    def _first(self, rows_class: int, mono: Call, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The checked call: both forms, a comparison, a vote. Returns the separate form's result if it says no."""
        if self._session.is_capturing():
            raise UsageError(
                f"the first result of the mono layer of {rows_class} rows cannot be checked in a capture; call the "
                "runner once before it"
            )
        result = mono(*arguments, **named)
        reference = self._separate(*arguments, **named)
        problem = difference(_tensors(result), _tensors(reference), self._tolerance)
        if reasons := self._session.world.vote(not problem, problem):
            self._refused = (
                f"the first result of the mono layer of {rows_class} rows of model {self.chooser.model!r} is not the "
                f"separate one's ({'; '.join(reasons)})"
            )
            self._session.say_once(f"flycomm uses separate kernels from now on: {self._refused}")
            return reference
        self._checked.add(rows_class)
        return result


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def difference(results: Sequence[torch.Tensor], references: Sequence[torch.Tensor], tolerance: float) -> str:
    """How tensors are over ``tolerance`` (a share of the reference's largest element) apart; empty if none are.

    NaN and infinity, in either, are a difference. Waits for the device.
    """
    if len(results) != len(references):
        return f"{len(results)} tensors instead of {len(references)}"
    for i, (result, reference) in enumerate(zip(results, references, strict=True)):
        if result.shape != reference.shape or result.dtype != reference.dtype:
            return (
                f"tensor {i} is {tuple(result.shape)} {result.dtype} instead of {tuple(reference.shape)} "
                f"{reference.dtype}"
            )
        if not reference.numel():
            continue
        wide, exact = result.double(), reference.double()
        apart = (wide - exact).abs().max().item()
        largest = exact.abs().max().item()
        if not apart <= tolerance * largest:
            return f"tensor {i} is off by {apart:.3g} where the largest element is {largest:.3g}"
    return ""
