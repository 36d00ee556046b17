# SPDX-License-Identifier: Apache-2.0
"""torch's symmetric memory ops, with inputs that are already in symmetric memory: no copy is timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from flycomm.bench.baselines.distributed import NO_GROUP
from flycomm.bench.contender import Contender, Context


class _SymmMem(Contender):
    def available(self, context: Context) -> str | None:
        if context.group is None:
            return NO_GROUP
        if context.device.type == "cpu":
            return "torch's symmetric memory needs a GPU"
        return None

    def prepare(self, context: Context, inputs: Sequence[torch.Tensor]) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        self._name = context.group.group_name
        self._buffers = []
        for one in inputs:
            buffer = symm_mem.empty(one.numel(), dtype=one.dtype, device=one.device)
            symm_mem.rendezvous(buffer, self._name)
            self._buffers.append(buffer.copy_(one))
        context.synchronize()


class TorchOneShot(_SymmMem):
    name = "torch_one_shot"
    does: ClassVar = {"all_reduce": ("sum",)}

    def prepare(self, context: Context, inputs: Sequence[torch.Tensor]) -> None:
        super().prepare(context, inputs)
        self._outputs = [torch.empty_like(one) for one in inputs]

    def call(self, index: int) -> torch.Tensor:
        one_shot = torch.ops.symm_mem.one_shot_all_reduce_out
        return one_shot(self._buffers[index], "sum", self._name, self._outputs[index])


class TorchTwoShot(_SymmMem):
    name = "torch_two_shot"
    does: ClassVar = {"all_reduce": ("sum",)}
    in_place = True

    def call(self, index: int) -> torch.Tensor:
        return torch.ops.symm_mem.two_shot_all_reduce_(self._buffers[index], "sum", self._name)


class TorchReduceScatter(_SymmMem):
    """The first half of the two-shot kernel."""

    name = "torch_reduce_scatter"
    does: ClassVar = {"reduce_scatter": ("sum",)}

    def prepare(self, context: Context, inputs: Sequence[torch.Tensor]) -> None:
        super().prepare(context, inputs)
        self._outputs = [context.collective.empty_output(one, context.world.size) for one in inputs]

    def call(self, index: int) -> torch.Tensor:
        out = torch.ops.symm_mem.reduce_scatter_out
        return out(self._buffers[index], self._name, False, self._outputs[index])


class TorchLowContention(_SymmMem):
    """Copies by the copy engines between two barriers, and a sum after them; on a stream of torch's own."""

    name = "torch_low_contention"
    does: ClassVar = {"all_gather": (None,), "reduce_scatter": ("sum", "avg")}

    def prepare(self, context: Context, inputs: Sequence[torch.Tensor]) -> None:
        super().prepare(context, inputs)
        self._reduction = context.collective.reduction

    def call(self, index: int) -> torch.Tensor:
        ops, x = torch.ops.symm_mem, self._buffers[index]
        if self._reduction is None:
            result = ops._low_contention_all_gather(x, self._name)
        else:
            result = ops._low_contention_reduce_scatter(x, self._reduction, self._name)
        return torch.ops._c10d_functional.wait_tensor(result)
