# SPDX-License-Identifier: Apache-2.0
"""torch.distributed's own backends. All-reduce in place: values grow with every timed call, which costs no time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist

from flycomm.bench.contender import Contender, Context
from flycomm.dtypes import REDUCTIONS

NO_GROUP = "needs one process a rank with torch.distributed: start the command with torchrun or mpirun"

# torch 2.13 gives these two new names, and warns of the old ones
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class OfGroup(Contender):
    """Something that a group's own backend takes part in."""

    target: ClassVar[str]  # the flycomm target whose tensors the backend takes

    def available(self, context: Context) -> str | None:
        if context.group is None:
            return NO_GROUP
        if context.target.name != self.target:
            return f"runs on target {self.target}, not on {context.target.name}"
        return None


class _Distributed(OfGroup):
    does: ClassVar = {"all_reduce": REDUCTIONS, "all_gather": (None,), "reduce_scatter": REDUCTIONS}

    def prepare(self, context: Context, inputs: Sequence[torch.Tensor]) -> None:
        self._group = context.group
        self._collective = context.collective.name
        self._op = (
            getattr(dist.ReduceOp, context.collective.reduction.upper()) if context.collective.reduction else None
        )
        self.in_place = self._collective == "all_reduce"
        self._inputs, self._outputs = self._buffers(context, inputs)

    def _buffers(
        self, context: Context, inputs: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Copies of the inputs, and where results go: in place for an all-reduce."""
        copies = [one.clone() for one in inputs]
        if self.in_place:
            return copies, copies
        return copies, [context.collective.empty_output(one, context.world.size) for one in copies]

    def call(self, index: int) -> torch.Tensor:
        x, out = self._inputs[index], self._outputs[index]
        if self._collective == "all_gather":
            all_gather(out, x, group=self._group)
        elif self._collective == "reduce_scatter":
            _reduce_scatter(out, x, self._op, group=self._group)
        else:
            dist.all_reduce(x, self._op, group=self._group)
        return out


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

    def _buffers(
        self, context: Context, inputs: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        self._backend = context.group._get_backend(context.device)
        dist.all_reduce(inputs[0].clone(), group=context.group)  # the communicator must exist before it takes a window
        context.synchronize()
        self._pool = torch.cuda.MemPool(self._backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            made = super()._buffers(context, inputs)
        self._backend.register_mem_pool(self._pool, symm=True)
        return made

    def release(self, context: Context) -> None:
        self._backend.deregister_mem_pool(self._pool)
        del self._inputs, self._outputs, self._pool
