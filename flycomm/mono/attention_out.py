# SPDX-License-Identifier: Apache-2.0
"""The mono layer behind attention, up to the choice of experts, on a communicator."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from flycomm.communicator import Communicator
from flycomm.errors import UsageError
from flycomm.kernels.mono_attention_out import Layer, build, scratch_bytes, slot_bytes
from flycomm.mono._layer import LayerBase, check_shape, rows_of

_ROUTERS = {"bf16": torch.bfloat16, "f32": torch.float32}


class Routed(NamedTuple):
    """What :class:`AttentionOutLayer` returns: the same bits on all ranks."""

    residual_out: torch.Tensor  # (rows, hidden) bf16
    normed: torch.Tensor  # (rows, hidden) bf16
    topk_ids: torch.Tensor  # (rows, top_k) i32
    topk_weights: torch.Tensor  # (rows, top_k) f32


class AttentionOutLayer(LayerBase):
    """One shape of the layer of :mod:`flycomm.kernels.mono_attention_out`, for the weights of any number of layers.

    ``comm``: a communicator made with ``kernel_channels={channel: (blocks, slot_bytes(layer))}``; ``layer``: the shape
    on one rank; ``threads`` a block, a multiple of 64. Collective: every rank makes it, with the same values, before
    the first launch. Compiles, and allocates the scratch.

    Raises :class:`ResidencyError`, with the numbers, if the grid cannot be resident as a whole; :class:`UsageError` for
    a layer that the kernel cannot do.
    """

    def __init__(self, comm: Communicator, channel: str, layer: Layer, threads: int = 256):
        check_shape(layer, Layer)
        self.layer = one = layer
        how = f"{one.router}_{one.scoring}{'_bias' * one.bias}{'_renormalized' * one.renormalize}"
        shape = f"{one.hidden}_{one.inner}_{one.top_k}of{one.experts}"
        name = f"mono_attention_out_{shape}_{how}_{one.protocol}_{one.math}_r{one.rows}"
        scratch, slot = partial(scratch_bytes, layer), slot_bytes(layer)
        super().__init__(comm, channel, name, build(layer), layer.rows, scratch, slot, threads)

    def __call__(
        self,
        x: torch.Tensor,  # (rows, inner) bf16: this rank's heads
        residual: torch.Tensor,  # (rows, hidden) bf16
        o_proj: torch.Tensor,  # (hidden, inner) bf16
        norm_weight: torch.Tensor,  # (hidden,) bf16
        router: torch.Tensor,  # (experts, hidden) of the layer's router type
        bias: torch.Tensor | None = None,  # (experts,) f32, if the layer has one
        eps: float = 1e-6,
    ) -> Routed:
        """The sum with the residual, its norm, and the chosen experts with their weights, best first.

        All contiguous, on the communicator's device; ``residual``, the norm's weight, ``router`` and ``bias`` are the
        same on all ranks. One launch on torch's current stream, always the same one; every rank calls it with as many
        rows, 1 to the layer's. May be captured in a graph. Raises :class:`CommTimeout` when an earlier call's wait gave
        up, as ``comm.check()`` does; what is not right of a call that failed is NaN, and -1 for an id.
        """
        rows, one, bf16 = rows_of(x), self.layer, torch.bfloat16
        self._enter(rows)
        if (bias is not None) != one.bias:
            raise UsageError(
                f"bias is {'missing' if one.bias else 'given'} where the layer has bias={one.bias}; pass one if, and "
                "only if, the layer was made for it"
            )
        made = Routed(
            torch.empty(rows, one.hidden, dtype=bf16, device=x.device),
            torch.empty(rows, one.hidden, dtype=bf16, device=x.device),
            torch.empty(rows, one.top_k, dtype=torch.int32, device=x.device),
            torch.empty(rows, one.top_k, dtype=torch.float32, device=x.device),
        )
        no_bias = (made.topk_weights, made.topk_weights.shape, torch.float32)  # an address that is not read
        given = {
            "x": (x, (rows, one.inner), bf16),
            "residual": (residual, (rows, one.hidden), bf16),
            "o_proj": (o_proj, (one.hidden, one.inner), bf16),
            "norm_weight": (norm_weight, (one.hidden,), bf16),
            "router": (router, (one.experts, one.hidden), _ROUTERS[one.router]),
            "bias": no_bias if bias is None else (bias, (one.experts,), torch.float32),
        }
        self._launch(given, tuple(made), rows, eps)
        return made
