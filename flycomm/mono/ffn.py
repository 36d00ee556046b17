# SPDX-License-Identifier: Apache-2.0
"""The mono feed-forward layer on a communicator."""

from __future__ import annotations

from functools import partial

import torch

from flycomm.communicator import Communicator
from flycomm.kernels.mono_ffn import Layer, build, scratch_bytes, slot_bytes
from flycomm.mono._layer import LayerBase, check_shape, rows_of


class FfnLayer(LayerBase):
    """One shape of the layer of :mod:`flycomm.kernels.mono_ffn`, for the weights of any number of layers.

    ``comm``: a communicator made with ``kernel_channels={channel: (blocks, slot_bytes(layer))}``; ``layer``: the shape
    on one rank; ``threads`` a block, a multiple of 64. Collective: every rank makes it, with the same values, before
    the first launch. Compiles, and allocates the scratch.

    Raises :class:`ResidencyError`, with the numbers, if the grid cannot be resident as a whole; :class:`UsageError` for
    a layer that the kernel cannot do.
    """

    def __init__(self, comm: Communicator, channel: str, layer: Layer, threads: int = 256):
        check_shape(layer, Layer)
        self.layer = layer
        name = f"mono_ffn_{layer.hidden}_{layer.inter}_{layer.out}_{layer.protocol}_{layer.math}_r{layer.rows}"
        scratch, slot = partial(scratch_bytes, layer), slot_bytes(layer)
        super().__init__(comm, channel, name, build(layer), layer.rows, scratch, slot, threads)

    def __call__(
        self,
        x: torch.Tensor,  # (rows, hidden)
        residual: torch.Tensor,  # (rows, hidden)
        gate_up: torch.Tensor,  # (2 * inter, hidden), gate first
        down: torch.Tensor,  # (hidden, inter)
        norm_weight: torch.Tensor,  # (hidden,)
        projection: torch.Tensor,  # (out, hidden)
        eps: float = 1e-6,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(out, residual_out)``, (rows, out) and (rows, hidden). All bf16, contiguous, on the communicator's device.

        One launch on torch's current stream, always the same one; every rank calls it with as many rows, 1 to the
        layer's. May be captured in a graph. Raises :class:`CommTimeout` when an earlier call's wait gave up, as
        ``comm.check()`` does; every element of a call that failed is right or NaN.
        """
        rows, one, bf16 = rows_of(x), self.layer, torch.bfloat16
        self._enter(rows)
        residual_out = torch.empty(rows, one.hidden, dtype=bf16, device=x.device)
        out = torch.empty(rows, one.out, dtype=bf16, device=x.device)
        given = {
            "x": (x, (rows, one.hidden), bf16),
            "residual": (residual, (rows, one.hidden), bf16),
            "gate_up": (gate_up, (2 * one.inter, one.hidden), bf16),
            "down": (down, (one.hidden, one.inter), bf16),
            "norm_weight": (norm_weight, (one.hidden,), bf16),
            "projection": (projection, (one.out, one.hidden), bf16),
        }
        self._launch(given, (residual_out, out), rows, eps)
        return out, residual_out
