# SPDX-License-Identifier: Apache-2.0
"""A rank's part of the sum in a mixture-of-experts layer: rows of experts, their weights, and where they lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flycomm.collectives import NAMES
from flycomm.errors import UsageError
from flycomm.primitives.experts import MOST, Experts
from flycomm.validate import as_usable, check_tensor


@dataclass(frozen=True)
class ExpertRows:
    """Tensors of :meth:`~flycomm.communicator.Communicator.moe_finalize_all_reduce_rms_norm`, for (…, hidden) rows."""

    out: torch.Tensor  # (…, topk, hidden), or with an index (permuted, hidden)
    weights: torch.Tensor  # (…, topk), of the data type or f32
    index: torch.Tensor | None = None  # (…, topk), i32: rows of out; below 0: another rank's
    shared: torch.Tensor | None = None  # (…, hidden)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """In the order of the kernel's arguments."""
        return self.out, self.weights, self.index, self.shared

    def check(self, residual: torch.Tensor) -> None:
        """Raise :class:`UsageError` unless these are rows for ``residual`` (…, hidden), on its device."""
        check_tensor("expert_out", self.out)
        check_tensor("topk_weights", self.weights)
        check_tensor("index", self.index, optional=True)
        check_tensor("shared", self.shared, optional=True)
        if residual.dim() == 0:
            raise UsageError("residual has no dimensions; pass (…, hidden)")
        lead, hidden = residual.shape[:-1], residual.shape[-1]
        topk = self.weights.shape[-1] if self.weights.dim() else 0
        if self.weights.shape != (*lead, topk) or self.weights.dtype not in (residual.dtype, torch.float32):
            raise UsageError(
                f"topk_weights is {tuple(self.weights.shape)} {self.weights.dtype}; pass {(*lead, 'topk')} of the "
                "residual's type or float32"
            )
        if not 1 <= topk <= MOST:
            raise UsageError(
                f"topk_weights has {topk} experts a row, not 1..{MOST}; sum the rows of further ones before"
            )
        shape = (*lead, topk, hidden) if self.index is None else (*self.out.shape[:1], hidden)
        if self.out.shape != shape or self.out.dtype != residual.dtype:
            wanted = (*lead, topk, hidden) if self.index is None else ("rows", hidden)
            raise UsageError(
                f"expert_out is {tuple(self.out.shape)} {self.out.dtype}; pass {wanted} of the residual's type, "
                f"{residual.dtype}" + (", or an index with rows in another order" if self.index is None else "")
            )
        if self.index is not None and (self.index.shape != self.weights.shape or self.index.dtype != torch.int32):
            raise UsageError(
                f"index is {tuple(self.index.shape)} {self.index.dtype}; pass int32 of topk_weights' shape, "
                f"{tuple(self.weights.shape)}"
            )
        if self.shared is not None and (self.shared.shape != residual.shape or self.shared.dtype != residual.dtype):
            raise UsageError(
                f"shared is {tuple(self.shared.shape)} {self.shared.dtype}; pass a tensor that is like the residual, "
                f"{tuple(residual.shape)} {residual.dtype}"
            )
        for one in self.tensors:
            if one is not None and one.device != residual.device:
                raise UsageError(f"a tensor of experts is on {one.device}, the residual on {residual.device}; move it")

    @property
    def layout(self) -> Experts:
        """What a kernel for these is compiled for."""
        weight = "" if self.weights.dtype == self.out.dtype else NAMES[self.weights.dtype]
        return Experts(self.weights.shape[-1], weight, self.index is not None, self.shared is not None)

    def usable(self) -> ExpertRows:
        """The same as kernels read it: contiguous, rows 16-byte aligned; copies where need be."""
        index = None if self.index is None else self.index.contiguous()
        shared = None if self.shared is None else as_usable(self.shared)
        return ExpertRows(as_usable(self.out), self.weights.contiguous(), index, shared)

    def total(self) -> torch.Tensor:
        """The weighted sum in torch, (…, hidden): in the kernel's order, f32, rounded once."""
        weights, index = self.weights.float(), self.index
        total = torch.zeros((*weights.shape[:-1], self.out.shape[-1]), dtype=torch.float32, device=self.out.device)
        for k in range(weights.shape[-1] if self.out.numel() else 0):
            weight = weights[..., k, None]
            if index is None:
                total = total + weight * self.out[..., k, :].float()
            else:
                at = index[..., k]
                term = total + weight * self.out[at.clamp(min=0)].float()
                total = torch.where(at[..., None] >= 0, term, total)
        if self.shared is not None:
            total = total + self.shared.float()
        return total.to(self.out.dtype)
