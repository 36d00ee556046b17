# SPDX-License-Identifier: Apache-2.0
"""A world over torch.distributed."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
import torch.distributed as dist

from flycomm.errors import CommError, UsageError
from flycomm.world._base import Device, World


class TorchWorld(World):
    """The ranks of a process group, ``group``; see :meth:`World.from_group`."""

    def __init__(self, group: Any, cpu_group: Any, device: Device):
        if not dist.is_available() or not dist.is_initialized():
            raise UsageError(
                "torch.distributed is not initialised; call torch.distributed.init_process_group first, "
                "or use World.auto() under torchrun"
            )
        group = group if group is not None else dist.group.WORLD
        rank = dist.get_rank(group)
        if rank < 0:
            raise UsageError(f"rank {dist.get_rank()} is not in the group; make its world on the group's ranks only")
        if cpu_group is not None:
            _check_cpu_group(group, cpu_group)
        if device is None:
            device = getattr(group, "bound_device_id", None)
        local_rank = os.environ.get("LOCAL_RANK")
        super().__init__(rank, dist.get_world_size(group), device, int(local_rank) if local_rank else dist.get_rank())
        # Weakly, for torch owns groups: gloo's threads run until the last reference is gone, and one of them can abort
        # a process that ends after destroy_process_group() while it still runs.
        self._group = weakref.ref(group)
        self._exchange_group = weakref.ref(cpu_group if cpu_group is not None else group)
        self._on_cpu = _has_cpu_backend(cpu_group if cpu_group is not None else group)
        self._owns_process_group = False

    @classmethod
    def started_by_torchrun(cls, device: Device) -> TorchWorld:
        """Initialise the default process group from torchrun's environment; :meth:`close` destroys it."""
        dist.init_process_group()
        world = cls(None, None, device)
        world._owns_process_group = True
        return world

    @property
    def group(self) -> Any:
        """The process group, or None once torch has destroyed it. Keep no reference: see ``__init__``."""
        return self._group()

    def _gather(self, payload: bytes) -> list[bytes]:
        place = torch.device("cpu") if self._on_cpu else torch.device("cuda", self.device)
        group = self._exchange_group()
        if group is None:
            raise CommError(f"rank {self.rank} exchanges bytes after its process group was destroyed; close it before")
        try:
            lengths = [int(one) for one in self._all_gather(torch.tensor([len(payload)], device=place), group)]
            padded = torch.frombuffer(bytearray(payload.ljust(max(lengths), b"\0")), dtype=torch.uint8)
            received = [one.cpu().numpy().tobytes() for one in self._all_gather(padded.to(place), group)]
        except (RuntimeError, ValueError) as error:  # torch has no base of its own for what a backend raises
            raise CommError(
                f"rank {self.rank} of {self.size} could not exchange bytes with the group: {error}; "
                "look at the other ranks: one of them may have ended"
            ) from error
        return [message[:length] for message, length in zip(received, lengths, strict=True)]

    def _all_gather(self, mine: torch.Tensor, group: Any) -> list[torch.Tensor]:
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=group)
        return parts

    def close(self) -> None:
        if not self._closed and self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()
        super().close()


def _has_cpu_backend(group: Any) -> bool:
    return any(entry.split(":")[0] == "cpu" for entry in dist.get_backend_config(group).split(","))


def _check_cpu_group(group: Any, cpu_group: Any) -> None:
    ranks, cpu_ranks = dist.get_process_group_ranks(group), dist.get_process_group_ranks(cpu_group)
    if ranks != cpu_ranks:
        raise UsageError(
            f"cpu_group has ranks {cpu_ranks} and group has {ranks}; make both of the same ranks, in order"
        )
    if not _has_cpu_backend(cpu_group):
        raise UsageError(
            f"cpu_group has backend {dist.get_backend_config(cpu_group)}, which moves no CPU tensors; make it with gloo"
        )
