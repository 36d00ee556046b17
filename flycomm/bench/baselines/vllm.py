# SPDX-License-Identifier: Apache-2.0
"""vLLM's custom all-reduce, from the FlashInfer wheel, used as vLLM does: eager calls copy into a registered buffer,
captured ones read the input where it lies, after its allocation has been registered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from flycomm.bench.baselines.flashinfer import comm_module, missing
from flycomm.bench.contender import Contender, Context
from flycomm.views import tensor_at

_BLOCKS = 36  # vLLM's own limit
_RANK_DATA_BYTES = 8 << 20
_MAX_BYTES = 8 << 20  # of a message: vLLM's own limit
_WORLDS = (2, 4, 6, 8)


class Vllm(Contender):
    name = "vllm"
    does: ClassVar = {"all_reduce": ("sum",)}

    def available(self, context: Context) -> str | None:
        if context.world.size not in _WORLDS:
            return f"a world of {context.world.size} ranks is not one of {', '.join(map(str, _WORLDS))}"
        return missing(context)

    # Made once and kept: it opens the allocations of registered inputs, and none can be opened twice in a process.
    _made: ClassVar[tuple[int, int] | None] = None  # handle, address of the own staging
    _rank_data: ClassVar[Any] = None

    def prepare(self, context: Context, inputs: Sequence[torch.Tensor]) -> None:
        self._comm = comm_module()
        self._inputs = list(inputs)
        self._outputs = [torch.empty_like(one) for one in inputs]
        if Vllm._made is None:
            Vllm._made = self._make(context)
        self._handle, self._staging = Vllm._made

    def _make(self, context: Context) -> tuple[int, int]:
        meta_bytes = self._comm.vllm_meta_size() + _MAX_BYTES
        rank = context.world.rank
        meta = self._comm.create_shared_buffer(meta_bytes, context.group)
        buffer = self._comm.create_shared_buffer(_MAX_BYTES, context.group)
        tensor_at(meta[rank], meta_bytes, context.device).zero_()  # flags: the allocation is as it came
        context.synchronize()
        context.world.barrier()
        Vllm._rank_data = torch.empty(_RANK_DATA_BYTES, dtype=torch.uint8, device=context.device)
        handle = self._comm.vllm_init_custom_ar(meta, Vllm._rank_data, rank, True)
        self._comm.vllm_register_buffer(handle, buffer)
        return handle, buffer[rank]

    def call(self, index: int) -> torch.Tensor:
        staging, size = (0, 0) if torch.cuda.is_current_stream_capturing() else (self._staging, _MAX_BYTES)
        out = self._outputs[index]
        self._comm.vllm_all_reduce(self._handle, self._inputs[index], out, staging, size, _BLOCKS)
        return out

    def captured(self, context: Context) -> None:
        handle, offsets = self._comm.vllm_get_graph_buffer_ipc_meta(self._handle)
        mine = json.dumps([list(handle), list(offsets)]).encode()
        handles, all_offsets = zip(*(json.loads(one) for one in context.world.exchange(mine)), strict=True)
        self._comm.vllm_register_graph_buffers(self._handle, list(handles), list(all_offsets))
