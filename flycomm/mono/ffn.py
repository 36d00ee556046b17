# SPDX-License-Identifier: Apache-2.0
"""The mono feed-forward layer on a communicator: its scratch, its residency, its launches."""

from __future__ import annotations

import torch

from flycomm import targets
from flycomm.communicator import Communicator
from flycomm.errors import UsageError
from flycomm.kernels import Specialization
from flycomm.kernels.mono_ffn import Layer, build, scratch_bytes
from flycomm.residency import check_resident, resident_blocks


class FfnLayer:
    """One shape of the layer of :mod:`flycomm.kernels.mono_ffn`, for the weights of any number of layers.

    ``comm``: a communicator made with ``kernel_channels={channel: (blocks, slot_bytes(layer))}``; ``layer``: the shape
    on one rank; ``threads`` a block, a multiple of 64. Collective: every rank makes it, with the same values, before
    the first launch. Compiles, and allocates the scratch.

    Raises :class:`ResidencyError`, with the numbers, if the grid cannot be resident as a whole; :class:`UsageError` for
    a layer that the kernel cannot do.
    """

    def __init__(self, comm: Communicator, channel: str, layer: Layer, threads: int = 256):
        self.comm = comm
        self.layer = layer
        self.peers = comm.peers(channel)
        blocks = self.peers.blocks
        name = f"mono_ffn_{layer.hidden}_{layer.inter}_{layer.out}_{layer.protocol}_r{layer.rows}"
        fixed = Specialization(name, build(layer), comm.world_size, "bf16", blocks, threads, 256)
        self.kernel = comm._session.load(fixed)
        target, device = targets.active(), comm.device.index or 0
        ranks = comm._session.ranks_on_device()
        check_resident(name, blocks, ranks, resident_blocks(self.kernel, target, device))
        self.scratch = torch.zeros(scratch_bytes(layer, blocks), dtype=torch.uint8, device=comm.device)
        target.runtime.synchronize(device)

    def reset(self) -> None:
        """Forget all marks: after ``comm.recover()``, when epochs begin anew. With no launch in flight."""
        self.scratch.zero_()

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
        self.comm.check()
        rows, one = x.shape[0], self.layer
        if not 1 <= rows <= one.rows:
            raise UsageError(
                f"{rows} rows are not in 1..{one.rows}; make a layer of a larger class, or split the batch"
            )
        wanted = {
            "x": (x, (rows, one.hidden)),
            "residual": (residual, (rows, one.hidden)),
            "gate_up": (gate_up, (2 * one.inter, one.hidden)),
            "down": (down, (one.hidden, one.inter)),
            "norm_weight": (norm_weight, (one.hidden,)),
            "projection": (projection, (one.out, one.hidden)),
        }
        for name, (tensor, shape) in wanted.items():
            _check(name, tensor, shape, self.comm.device)
        residual_out = torch.empty_like(residual)
        out = torch.empty(rows, one.out, dtype=x.dtype, device=x.device)
        tensors = [tensor for tensor, _ in wanted.values()]
        addresses = [tensor.data_ptr() for tensor in (*tensors, residual_out, out, self.scratch)]
        self.kernel(self.peers, 0, *addresses, rows, eps, self.comm.stream())
        targets.active().raise_pending()
        return out, residual_out


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    fits = tensor.shape == shape and tensor.dtype == torch.bfloat16 and tensor.device == device
    if not fits or not tensor.is_contiguous() or tensor.data_ptr() % 16:
        raise UsageError(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; pass {shape} torch.bfloat16 on "
            f"{device}, contiguous and 16-byte aligned"
        )
