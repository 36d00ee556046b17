# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's one-shot all-reduce, from the FlashInfer wheel. Compiles on first use, which takes minutes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch

from flycomm.bench.baselines.distributed import NO_GROUP
from flycomm.bench.contender import Contender, Context

_MAX_HIDDEN = 8192  # elements a row


def missing(context: Context) -> str | None:
    """Why FlashInfer's communication kernels cannot be tried here; None if they can."""
    if context.group is None:
        return NO_GROUP
    if context.target.name != "cuda":
        return f"FlashInfer runs on target cuda, not on {context.target.name}"
    return None if find_spec("flashinfer") else "flashinfer is not installed: pip install flashinfer-python"


def comm_module() -> Any:
    """``flashinfer.comm``. It imports parts of the package ``cuda`` that another folder of the path may have."""
    cuda = import_module("cuda")
    for entry in sys.path:
        folder = str(Path(entry, "cuda"))
        if Path(folder).is_dir() and folder not in cuda.__path__:
            cuda.__path__.append(folder)
    return import_module("flashinfer.comm")


def rows_of(count: int) -> tuple[int, int]:
    """``count`` elements as (rows, row length): as long as a hidden state may be, and a power of two."""
    hidden = min(_MAX_HIDDEN, count & -count)
    return count // hidden, hidden


class FlashInferOneShot(Contender):
    """Backend "trtllm" by name: the others use NVLink multicast, which not every machine may."""

    name = "flashinfer_one_shot"
    does: ClassVar = {"all_reduce": ("sum",)}

    def __init__(self, pdl: bool = False):
        self._pdl = pdl

    def available(self, context: Context) -> str | None:
        return missing(context)

    def prepare(self, context: Context, inputs: Sequence[torch.Tensor]) -> None:
        comm = comm_module()
        self._all_reduce = comm.allreduce_fusion
        self._pattern = comm.AllReduceFusionPattern.kAllReduce
        rows, hidden = rows_of(inputs[0].numel())
        self._inputs = [one.view(rows, hidden) for one in inputs]
        self._outputs = [torch.empty_like(one) for one in self._inputs]
        self._workspace = comm.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=context.world.size,
            rank=context.world.rank,
            max_token_num=rows,
            hidden_dim=hidden,
            dtype=inputs[0].dtype,
            group=context.group,
        )

    def call(self, index: int) -> torch.Tensor:
        return self._all_reduce(
            input=self._inputs[index],
            workspace=self._workspace,
            pattern=self._pattern,
            launch_with_pdl=self._pdl,
            output=self._outputs[index],
            use_oneshot=True,
            fp32_acc=True,
        )

    def release(self, context: Context) -> None:
        self._workspace.destroy()
