# SPDX-License-Identifier: Apache-2.0
"""What every target offers: a FlyDSL compile backend, a runtime, memory that peers can map, and its capabilities.

A target is one file beside this one. Nothing outside ``flycomm.targets`` asks which target it runs on; it asks for a
capability, or calls one of these methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Availability:
    """Whether a target can run here; ``reason`` says in one sentence why not, or what was found."""

    ok: bool
    reason: str


@dataclass(frozen=True)
class Capabilities:
    """What kernels and geometries need to know of a device."""

    device_name: str
    arch: str  # "gfx942", "sm_90", "x86-64"
    warp_size: int  # threads
    compute_units: int  # multiprocessors, compute units or cores
    memory_bytes: int
    clock_hz: int  # ticks a second of the clock that kernels read
    graphs: bool  # whether launches can be captured and replayed


@dataclass(frozen=True)
class MappedMemory:
    """A few bytes that a kernel writes and the host reads without a copy or a synchronisation."""

    host_address: int
    device_address: int
    num_bytes: int


class Memory(ABC):
    """Device memory by address. Every method raises :class:`flycomm.errors.TargetError` with the driver's own words."""

    opens_own_exports: bool
    """Whether ``open`` works in the process that exported. Otherwise its virtual ranks use each other's addresses as
    they are, after ``enable_peer``."""

    @abstractmethod
    def allocate(self, num_bytes: int, device: int) -> int:
        """Zeroed memory that peers may map (uncached on rocm); returns its address, aligned to 4096 bytes."""

    @abstractmethod
    def free(self, address: int, device: int) -> None: ...

    @abstractmethod
    def export(self, address: int, device: int) -> bytes:
        """A handle of at most 128 bytes that another process of this machine can ``open``."""

    @abstractmethod
    def export_done(self, address: int, device: int) -> None:
        """Every peer has opened the handle: names that other processes could still see are removed."""

    @abstractmethod
    def open(self, handle: bytes, device: int) -> int:
        """Map a peer's memory; returns its address here."""

    @abstractmethod
    def close(self, address: int, device: int) -> None: ...

    @abstractmethod
    def sharing(self, device: int) -> str:
        """How memory of ``device`` reaches other processes: "shm", "ipc" or "fd"; shares a little of it to find out."""

    @abstractmethod
    def enable_peer(self, device: int, peer_device: int) -> None:
        """Let ``device`` use what this process allocates on ``peer_device``; safe to call again."""

    @abstractmethod
    def allocate_mapped(self, num_bytes: int, device: int) -> MappedMemory: ...

    @abstractmethod
    def free_mapped(self, memory: MappedMemory, device: int) -> None: ...

    @abstractmethod
    def write(self, address: int, data: bytes, device: int) -> None:
        """Copy host bytes to ``address`` and wait until they are there."""

    @abstractmethod
    def read(self, address: int, num_bytes: int, device: int) -> bytes:
        """Copy ``num_bytes`` from ``address`` to the host and wait for them."""

    @abstractmethod
    def fill(self, address: int, word: int, num_words: int, device: int) -> None:
        """Store the u32 ``word`` ``num_words`` times from ``address`` on, and wait."""


class Runtime(ABC):
    """Devices and streams, in torch's terms."""

    torch_device_type: ClassVar[str]  # "cuda" (CUDA and ROCm builds of torch) or "cpu"

    @abstractmethod
    def device_count(self) -> int: ...

    @abstractmethod
    def current_device(self) -> int: ...

    @abstractmethod
    def set_device(self, device: int) -> None: ...

    @abstractmethod
    def current_stream(self, device: int) -> int:
        """The raw handle of torch's current stream; 0 on a target without streams."""

    @abstractmethod
    def is_capturing(self, device: int) -> bool:
        """Whether torch's current stream is being captured into a graph."""

    @abstractmethod
    def synchronize(self, device: int) -> None: ...

    def hardware_queues(self) -> int:
        """How many streams of one device can run at the same time without waiting for each other; 0: any number."""
        return 0

    def rank_scope(self, device: int) -> AbstractContextManager[None]:
        """What a virtual rank's thread runs in: its device current, and a stream of its own current on it."""
        return nullcontext()

    def handle(self, stream: Any) -> int:
        """The raw handle of a torch stream; 0 on a target without streams."""
        return 0

    def order(self, earlier: int | None, stream: Any, device: int) -> None:
        """Make the torch stream ``stream`` wait for what the stream of raw handle ``earlier`` (if any) has queued."""
        return None


class Target(ABC):
    """One way to run a FlyDSL kernel. ``targets.get(name)`` gives the instance; there is one a process and name."""

    name: ClassVar[str]  # also the id of its FlyDSL compile backend and runtime kind
    memory: Memory
    runtime: Runtime

    @abstractmethod
    def availability(self) -> Availability:
        """Whether kernels can run here. Opens the driver; never raises for a missing one."""

    @abstractmethod
    def capabilities(self, device: int) -> Capabilities: ...

    @abstractmethod
    def register(self) -> None:
        """Make FlyDSL know this target's compile backend and runtime; safe to call again."""

    def compile_environment(self) -> dict[str, str]:
        """Environment variables that FlyDSL needs in force to compile for this target.

        Raises :class:`flycomm.errors.TargetError` when a tool that they point to is missing.
        """
        return {}

    def run_environment(self) -> dict[str, str]:
        """Environment variables that FlyDSL needs to compile for the devices of this process, beside those above."""
        return {}

    def module_place(self) -> int:
        """What of the current device a compiled kernel is for: one handle serves all devices of the same number."""
        return 0

    def raise_pending(self) -> None:
        """Raise what the last launch of this thread could not say: FlyDSL's launchers return nothing."""
        return None

    def start_early(self, allowed: bool) -> Callable[[], None]:
        """Whether kernels that wait for the one ahead of them by themselves may be launched before it has ended.

        Until the function that is returned is called, once. They are if somebody allows it and nobody forbids it; a
        graph keeps what it was captured with. Nothing on a target whose kernels always begin in turn.
        """
        return lambda: None

    def preload(self, compiled: Any, device: int) -> None:
        """Load the module of a compiled kernel onto ``device`` now, so that no later launch has to."""
        return None
