# SPDX-License-Identifier: Apache-2.0
"""What is timed: one interface for flycomm's collectives and for everything that they are compared with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from flycomm import dispatch
from flycomm.communicator import Communicator
from flycomm.targets import Target
from flycomm.world import World


@dataclass(frozen=True)
class Context:
    """One rank's surroundings. ``group`` is its process group (None for virtual ranks), ``stream`` the one torch stream
    that everything runs on (None on a target without streams). ``replay_stream``: where graphs are replayed, if not
    there."""

    world: World
    target: Target
    comm: Communicator
    group: Any
    stream: Any
    replay_stream: Any = None

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
    """An all-reduce that sums. Made once a case; all its methods are collective."""

    name: ClassVar[str]
    in_place: ClassVar[bool] = (
        False  # whether `call` overwrites the input, so that only its first result can be checked
    )

    def available(self, context: Context) -> str | None:
        """Why it cannot run here, in one sentence; None if it can. Decided before anything is allocated."""
        return None

    @abstractmethod
    def prepare(self, context: Context, inputs: Sequence[torch.Tensor]) -> None:
        """Take the inputs (one a buffer, contiguous, on the device), copied to where this contender needs them."""

    @abstractmethod
    def call(self, index: int) -> torch.Tensor:
        """All-reduce buffer ``index`` on the current stream; returns the result, which its next call may overwrite."""

    def captured(self, context: Context) -> None:
        """What has to happen between a capture and its first replay."""
        return None

    def release(self, context: Context) -> None:
        """Give back what :meth:`prepare` took. Every rank's work is done. Not called after a failure."""
        return None


class Flycomm(Contender):
    """The thing itself: out of place into ready outputs."""

    name = "flycomm"

    def prepare(self, context: Context, inputs: Sequence[torch.Tensor]) -> None:
        self._comm = context.comm
        self._inputs = list(inputs)
        self._outputs = [torch.empty_like(one) for one in inputs]
        if self.protocol(context, inputs[0]) != "fallback":
            context.comm.prepare([inputs[0].dtype], [inputs[0].nbytes])

    def call(self, index: int) -> torch.Tensor:
        return self._comm.all_reduce(self._inputs[index], out=self._outputs[index])

    @staticmethod
    def protocol(context: Context, x: torch.Tensor) -> str:
        """What an all-reduce of ``x`` uses: a protocol's name, or "fallback"."""
        comm = context.comm
        if not comm.should_use(x[:1]):  # not even the smallest message: no peer access, or not this dtype
            return "fallback"
        dtype = str(x.dtype).removeprefix("torch.")
        return dispatch.select(
            "all_reduce", "sum", comm.target, comm.world_size, x.nbytes, dtype, comm.max_bytes, comm.max_bytes
        ).protocol
