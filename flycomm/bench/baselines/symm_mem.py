# SPDX-License-Identifier: Apache-2.0
"""torch's symmetric memory ops, with inputs that are already in symmetric memory: no copy is timed."""

from __future__ import annotations

from collections.abc import Sequence

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

    def prepare(self, context: Context, inputs: Sequence[torch.Tensor]) -> None:
        super().prepare(context, inputs)
        self._outputs = [torch.empty_like(one) for one in inputs]

    def call(self, index: int) -> torch.Tensor:
        one_shot = torch.ops.symm_mem.one_shot_all_reduce_out
        return one_shot(self._buffers[index], "sum", self._name, self._outputs[index])


class TorchTwoShot(_SymmMem):
    name = "torch_two_shot"
    in_place = True

    def call(self, index: int) -> torch.Tensor:
        return torch.ops.symm_mem.two_shot_all_reduce_(self._buffers[index], "sum", self._name)
