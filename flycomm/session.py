# SPDX-License-Identifier: Apache-2.0
"""What the calls of one communicator share: its channels, its lanes, its failure, and compiled kernels."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch

from flycomm import kernels
from flycomm.channels import Channels
from flycomm.errors import (
    ClosedError,
    CommTimeout,
    DisagreementError,
    ResidencyError,
    StreamError,
    UsageError,
)
from flycomm.geometry import Geometry
from flycomm.layout import Key
from flycomm.targets import Target
from flycomm.validate import check_tensor
from flycomm.world import World

logger = logging.getLogger("flycomm")


class Session:
    """State of one communicator on one rank. ``channels`` is None where ranks cannot map each other's memory."""

    def __init__(self, world: World, target: Target, name: str, debug: bool):
        self.world = world
        self.target = target
        self.name = name
        self.debug = debug
        self.closed = False
        self.failure: CommTimeout | None = None
        self.channels: Channels | None = None
        self.streams: dict[int, int] = {}  # channel number → the raw stream that its eager lane belongs to
        self.lane_channels: dict[str, tuple[Geometry, int]] = {}  # of other kernels: wire → grid, bytes of a source
        self.trace: Any = None  # the flycomm.trace.Trace that is being recorded
        self.layers: WeakSet[Any] = WeakSet()  # mono layers: their marks hold epochs, and are reset with these
        self._said: set[str] = set()
        self._loaded: set[kernels.Specialization] = set()
        self._agreed: set[Hashable] = set()
        device_type = target.runtime.torch_device_type
        self.device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, world.device)

    # ------------------------------------------------------------------ before a call

    def enter(self) -> None:
        """Raise if the communicator is closed or an earlier wait gave up. Reads host memory: no synchronisation."""
        if self.closed:
            self.check_open()
        if self.failure is None and self.channels is not None and self.channels.failed():
            record = self.channels.failure()
            if record is not None:
                hint = " (init(debug=True) names their calls)" if record.reason == "mismatch" else ""
                self.failure = CommTimeout(f"{record}{hint}; call recover() on all ranks, or close", record)
        if self.failure is not None:
            raise CommTimeout(str(self.failure), self.failure.record)

    def check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"communicator {self.name!r} is closed; make another with flycomm.init")

    def require_channels(self) -> Channels:
        self.enter()
        if self.channels is None:
            raise UsageError("ranks cannot map each other's memory here, so there are no signals or buffers")
        return self.channels

    def check_device(self, x: torch.Tensor) -> None:
        if type(x) is not torch.Tensor:  # of a subclass, or no tensor at all: this is asked at every call
            check_tensor("the input", x)
        if x.device != self.device:
            raise UsageError(f"the tensor is on {x.device}, this communicator on {self.device}; move the tensor")

    def check_rank(self, rank: int) -> None:
        if rank not in range(self.world.size):
            raise UsageError(f"rank {rank!r} is not in 0..{self.world.size - 1}; pass a rank of this group")

    def roll_call(self, op: str, reduction: str, shape: tuple[int, ...], dtype: str) -> None:
        """In debug mode, compare what every rank is about to do, before a channel is touched."""
        if not self.debug:
            return
        said = self.world.exchange(json.dumps([op, reduction, shape, dtype]).encode())
        for rank, other in enumerate(said):
            if other != said[self.world.rank]:
                raise DisagreementError(
                    f"rank {self.world.rank} calls {said[self.world.rank].decode()}, rank {rank} calls "
                    f"{other.decode()}: all ranks must make the same call"
                )

    # ------------------------------------------------------------------ lanes

    def stream(self) -> int:
        return self.target.runtime.current_stream(self.world.device)

    def is_capturing(self) -> bool:
        return self.target.runtime.is_capturing(self.world.device)

    def claim(self, number: int, captured: bool, stream: int) -> None:
        """Raise unless channel ``number`` may be used on ``stream``. Captured lanes are not checked."""
        if not captured and self.streams.setdefault(number, stream) != stream:
            raise StreamError(
                f"channel {number} belongs to stream {self.streams[number]:#x}, this is stream {stream:#x}; hand "
                "it over with use_stream(), or use another channel"
            )

    def peers(self, key: Key) -> Any:
        """The kernel argument of a channel; raises :class:`UsageError` for a channel number that there is not."""
        assert self.channels is not None
        found = self.channels.peers.get(key)
        if found is None:
            count = 1 + max(slot.key.number for slot in self.channels.layout.slots)
            raise UsageError(f"channel {key.number} is not in 0..{count - 1}; pass a larger channels= to init")
        return found

    # ------------------------------------------------------------------ kernels

    def load(self, specialization: kernels.Specialization) -> Any:
        """The launch handle of a kernel; while a trace is recorded, of its form that makes records. Virtual ranks that
        share a GPU load it together: nobody may launch and wait while another still loads the module."""
        specialization = self._form(specialization)
        handle = kernels.compiled(specialization)
        if self.world.local and self.device.type != "cpu" and specialization not in self._loaded:
            self.target.preload(handle, self.world.device)
            self._loaded.add(specialization)
            self.world.barrier()
        return handle

    def load_one(
        self, agreed: Hashable, wanted: kernels.Specialization, general: Callable[[], kernels.Specialization]
    ) -> Any:
        """The launch handle of ``wanted``, of which ranks may have different ones; ``general()`` does all that it does.

        Virtual ranks that share a GPU load both when ``agreed``, the same on all of them, comes for the first time. If
        one wants a third later it gets the general one: it may not load while others, which load nothing, wait.
        """
        if not (self.world.local and self.device.type != "cpu"):
            return self.load(wanted)
        wanted = self._form(wanted)
        key = agreed, wanted.traced
        if key not in self._agreed:
            for one in (wanted, self._form(general())):
                self.target.preload(kernels.compiled(one), self.world.device)
                self._loaded.add(one)
            self._agreed.add(key)
            self.world.barrier()
        return kernels.compiled(wanted if wanted in self._loaded else self._form(general()))

    def _form(self, specialization: kernels.Specialization) -> kernels.Specialization:
        """Itself, or while a trace is recorded the form that makes records."""
        return specialization if self.trace is None else replace(specialization, traced=True)

    # ------------------------------------------------------------------ the rest

    def say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning("%s", message)

    def group(self) -> Any:
        """The torch.distributed group, or None. The world holds it weakly: who destroys it may do so before us."""
        return getattr(self.world, "group", None)

    def synchronize(self) -> None:
        self.target.runtime.synchronize(self.world.device)

    def ranks_on_device(self) -> int:
        """How many virtual ranks of this process share a device, at most: the same on all ranks, as their channels must
        be. They need a stream each."""
        if not self.world.local:
            return 1
        device, stream = self.world.device, self.stream()
        places = [tuple(json.loads(place)) for place in self.world.exchange(json.dumps([device, stream]).encode())]
        ranks = max(Counter(device for device, _ in places).values())
        queues = self.target.runtime.hardware_queues()
        if queues and len(set(places)) < len(places):
            raise StreamError(
                f"virtual ranks share a stream (device, stream: {places}), so one would wait for ever for another; "
                "start them with World.local(n).run, or make a stream current in each rank's thread"
            )
        if queues and ranks > queues:
            raise ResidencyError(
                f"{ranks} virtual ranks on one device are over its {queues} hardware queues; set "
                "CUDA_DEVICE_MAX_CONNECTIONS (or GPU_MAX_HW_QUEUES) before the first use of the GPU"
            )
        return ranks
