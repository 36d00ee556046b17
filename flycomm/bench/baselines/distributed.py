# SPDX-License-Identifier: Apache-2.0
"""torch.distributed's own backends. In place: values grow with every timed call, which costs no time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from flycomm.bench.contender import Contender, Context

NO_GROUP = "needs one process a rank with torch.distributed: start the command with torchrun or mpirun"


class _Distributed(Contender):
    in_place = True
    target: str  # the flycomm target whose tensors the backend takes

    def available(self, context: Context) -> str | None:
        if context.group is None:
            return NO_GROUP
        if context.target.name != self.target:
            return f"runs on target {self.target}, not on {context.target.name}"
        return None

    def prepare(self, context: Context, inputs: Sequence[torch.Tensor]) -> None:
        self._group = context.group
        self._buffers = [one.clone() for one in inputs]

    def call(self, index: int) -> torch.Tensor:
        dist.all_reduce(self._buffers[index], group=self._group)
        return self._buffers[index]


class Gloo(_Distributed):
    name = "gloo"
    target = "host"


class Nccl(_Distributed):
    name = "nccl"
    target = "cuda"


class Rccl(_Distributed):
    name = "rccl"
    target = "rocm"


class NcclWindow(_Distributed):
    """NCCL with its buffers in a pool that all ranks have registered as a symmetric window (NCCL 2.27, torch 2.9)."""

    name = "nccl_window"
    target = "cuda"

    def prepare(self, context: Context, inputs: Sequence[torch.Tensor]) -> None:
        self._group = context.group
        self._backend = context.group._get_backend(context.device)
        dist.all_reduce(inputs[0].clone(), group=context.group)  # the communicator must exist before it takes a window
        context.synchronize()
        self._pool = torch.cuda.MemPool(self._backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            self._buffers = [one.clone() for one in inputs]
        self._backend.register_mem_pool(self._pool, symm=True)

    def release(self, context: Context) -> None:
        self._backend.deregister_mem_pool(self._pool)
        del self._buffers, self._pool
