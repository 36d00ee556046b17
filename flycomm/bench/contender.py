# SPDX-License-Identifier: Apache-2.0
"""What is timed: one interface for flycomm's collectives (``ours``) and all that they are compared with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from flycomm.bench.collective import Collective
from flycomm.communicator import Communicator
from flycomm.targets import Target
from flycomm.world import World

Result = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Context:
    """One rank's surroundings, and what it measures.

    ``group`` is its process group (None for virtual ranks), ``stream`` the one torch stream that everything runs on
    (None on a target without streams). ``replay_stream``: where graphs are replayed, if not there.
    """

    world: World
    target: Target
    comm: Communicator
    group: Any
    stream: Any
    collective: Collective
    replay_stream: Any = None
    timeout: float | None = None  # seconds, of a wait inside a kernel; None: what flycomm.init takes

    @property
    def device(self) -> torch.device:
        return self.comm.device

    @property
    def graphs(self) -> bool:
        return self.target.capabilities(self.world.device).graphs

    def synchronize(self) -> None:
        """Wait for this rank's stream; not for its device, which other virtual ranks may be using."""
        if self.stream is not None:
            self.stream.synchronize()

    def align(self) -> None:
        """Collective: the ranks' streams go on from here at the same time."""
        self.world.barrier()
        if self.stream is not None:
            self.comm.barrier()


class Contender(ABC):
    """Something that does one or several of ``options.NAMES``. Made once a case; all its methods are collective."""

    name: ClassVar[str]
    does: ClassVar[Mapping[str, Sequence[str | None]]]  # collective to reductions (None: it reduces nothing)
    in_place: bool = False  # whether `call` overwrites the input, so that only its first result can be checked

    def refusal(self, context: Context) -> str | None:
        """Why it cannot run here, in one sentence; None if it can. Decided before anything is allocated."""
        wanted = context.collective
        if wanted.name not in self.does:
            return f"does {', '.join(self.does)}, not {wanted.name}"
        if wanted.reduction not in self.does[wanted.name]:
            return f"{wanted.name} does {', '.join(map(str, self.does[wanted.name]))}, not {wanted.reduction}"
        return self.available(context)

    def available(self, context: Context) -> str | None:
        """As :meth:`refusal`, for what has to do with the machine, the target and the world."""
        return None

    @abstractmethod
    def prepare(self, context: Context, inputs: Sequence[Any]) -> None:
        """Take the inputs (one a buffer, on the device), copied to where this contender needs them: of a collective a
        1-D contiguous tensor, of others what their problem says."""

    @abstractmethod
    def call(self, index: int) -> Result:
        """Do buffer ``index`` on the current stream; returns the result, which its next call may overwrite."""

    def enqueue(self, index: int) -> object:
        """:meth:`call` by the way that a model would go, for the CPU's time; returns anything."""
        return self.call(index)

    def captured(self, context: Context) -> None:
        """What has to happen between a capture and its first replay."""
        return None

    def release(self, context: Context) -> None:
        """Give back what :meth:`prepare` took. Every rank's work is done. Not called after a failure."""
        return None
