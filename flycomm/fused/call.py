# SPDX-License-Identifier: Apache-2.0
"""The fused calls of one communicator: what is checked, which row of the table does it, and the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flycomm import kernels
from flycomm.collectives import NAMES, Collectives, tag_of
from flycomm.dispatch import Plan
from flycomm.errors import UsageError
from flycomm.fused import steps
from flycomm.fused.experts import ExpertRows
from flycomm.kernels._quantized import QUANTS
from flycomm.kernels.reduce_norm import Variant, size_for, slot_bytes
from flycomm.layout import Routes, key_of
from flycomm.primitives.quant import GROUP, native
from flycomm.session import Session
from flycomm.tables import FUSED, Row
from flycomm.validate import ALIGNMENT, as_usable, check_tensor

Result = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class Norm:
    """What a call computes beside the sum. ``eps`` as in RMSNorm; ``gemma``: the factor is 1 + weight."""

    eps: float
    gemma: bool
    quantize: str  # of reduce_norm.QUANTS


class Fused:
    """The fused calls of one session; contracts in :class:`~flycomm.communicator.Communicator`."""

    def __init__(self, session: Session, collectives: Collectives, routes: Routes, arch: str):
        self._session = session
        self._collectives = collectives
        self._routes = routes
        self._fp8 = native(arch)

    @property
    def fp8(self) -> torch.dtype:
        """The 8-bit type that this device's matrix units take."""
        found: torch.dtype = getattr(torch, self._fp8.torch_name)
        return found

    def plan(self, dtype: torch.dtype, rows: int, hidden: int, captured: bool) -> Plan:
        """Of a call: with a row, one kernel; else "separate", or "fallback" as the all-reduce alone."""
        row = self._row_for(dtype, rows, hidden, captured)
        if row is not None:
            return Plan(row.protocol, row)
        alone = self._collectives.plan("all_reduce", "sum", dtype, rows * hidden * dtype.itemsize, captured)
        return Plan("separate") if alone.row is not None else alone

    def _row_for(self, dtype: torch.dtype, rows: int, hidden: int, captured: bool) -> Row | None:
        """The table's row for such a call; None where separate kernels do it. The same on all ranks."""
        if self._session.channels is None or dtype not in NAMES or hidden * dtype.itemsize % ALIGNMENT or not rows:
            return None
        for row in self._routes[FUSED[0], captured]:
            fits = slot_bytes(rows, hidden, NAMES[dtype], row.blocks, row.threads) <= row.capacity
            if fits and row.largest is not None and rows * hidden * dtype.itemsize <= row.largest:
                return row
        return None

    def __call__(
        self,
        x: torch.Tensor | ExpertRows,
        residual: torch.Tensor,
        weight: torch.Tensor,
        norm: Norm,
        scale: torch.Tensor | None,
        channel: int,
    ) -> Result:
        """``(normed, residual_out, codes, scales)``: the last two with ``norm.quantize``, else the first."""
        session = self._session
        session.enter()
        session.check_device(residual if isinstance(x, ExpertRows) else x)
        _check(x, residual, weight, norm, scale)
        if session.debug:
            session.roll_call(_name(x), str(norm), tuple(residual.shape), str(residual.dtype))
        captured = session.is_capturing()
        hidden = residual.shape[-1]
        rows = residual.numel() // max(1, hidden)
        row = self._row_for(residual.dtype, rows, hidden, captured)
        if row is None:
            return self._separately(x, residual, weight, norm, scale, channel)
        source = x.usable().tensors if isinstance(x, ExpertRows) else (as_usable(x),)
        added, factor = as_usable(residual), as_usable(weight)
        residual_out = torch.empty_like(added)
        normed = torch.empty_like(added) if norm.quantize == "none" else None
        codes, scales = self._outputs(residual, norm, scale)
        launch = self._launch(row, x, added, factor, rows, norm, channel, captured)
        stream = session.stream()
        session.claim(channel, captured, stream)
        tensors = (source[0], added, factor, residual_out, normed, codes, scales, *source[1:])
        launch(*(0 if one is None else one.data_ptr() for one in tensors), stream)
        session.target.raise_pending()
        return normed, residual_out, codes, scales

    def _launch(
        self,
        row: Row,
        x: torch.Tensor | ExpertRows,
        residual: torch.Tensor,
        weight: torch.Tensor,
        rows: int,
        norm: Norm,
        channel: int,
        captured: bool,
    ) -> Any:
        dtype, hidden = residual.dtype, residual.shape[-1]
        experts = x.layout if isinstance(x, ExpertRows) else None
        key = (FUSED[0], row, dtype, weight.dtype, rows, hidden, norm, experts, channel, captured)
        launch = self._collectives.kept(key)
        if launch is None:
            session, name = self._session, NAMES[dtype]
            size, exact = size_for(hidden, name, row.threads)
            variant = Variant(
                size,
                "" if weight.dtype == dtype else NAMES[weight.dtype],
                norm.gemma,
                norm.quantize,
                self._fp8,
                normed=norm.quantize == "none",
                experts=experts,
                exact=exact,
                single=rows <= row.blocks,
            )
            specialization = kernels.all_reduce_norm(session.world.size, name, row.geometry, row.protocol, variant)
            handle = session.load(specialization)
            peers = session.peers(key_of(row, channel, captured))
            tag = tag_of(f"{_name(x)} {norm}", str(dtype), rows * hidden, channel)
            fixed = (peers, tag, *(0,) * 10, rows, hidden, norm.eps, 0)
            varying = (*range(2, 9), *(() if experts is None else (9, 10, 11)), 15)
            launch = self._collectives.keep(key, kernels.bind(handle, fixed, varying))
        return launch

    def _outputs(
        self, x: torch.Tensor, norm: Norm, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if norm.quantize == "none":
            return None, None
        codes = torch.empty(x.shape, dtype=self.fp8, device=x.device)
        if norm.quantize == "static":
            return codes, scale
        groups = () if norm.quantize == "token" else (-(-x.shape[-1] // GROUP),)
        return codes, torch.empty((*x.shape[:-1], *groups), dtype=torch.float32, device=x.device)

    def _separately(
        self,
        x: torch.Tensor | ExpertRows,
        residual: torch.Tensor,
        weight: torch.Tensor,
        norm: Norm,
        scale: torch.Tensor | None,
        channel: int,
    ) -> Result:
        own = x.total() if isinstance(x, ExpertRows) else x
        total = self._collectives.all_reduce(own, "sum", None, channel)
        if total is None:
            raise UsageError(f"{_name(x)} has no result without an all-reduce; use fallback='group' or 'error'")
        normed, residual_out = steps.add_and_norm(total, residual, weight, norm.eps, norm.gemma)
        if norm.quantize == "none":
            return normed, residual_out, None, None
        return None, residual_out, *steps.quantize(normed, norm.quantize, self._fp8, scale)


def _name(x: torch.Tensor | ExpertRows) -> str:
    return "moe_finalize_all_reduce_rms_norm" if isinstance(x, ExpertRows) else "all_reduce_rms_norm"


def _check(
    x: torch.Tensor | ExpertRows,
    residual: torch.Tensor,
    weight: torch.Tensor,
    norm: Norm,
    scale: torch.Tensor | None,
) -> None:
    check_tensor("residual", residual)
    check_tensor("weight", weight)
    check_tensor("scale", scale, optional=True)
    if isinstance(x, ExpertRows):
        x.check(residual)
    elif x.dim() == 0 or residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device:
        raise UsageError(
            f"residual is {tuple(residual.shape)} {residual.dtype} on {residual.device}, the input {tuple(x.shape)} "
            f"{x.dtype} on {x.device}; pass a residual that is like the input"
        )
    if weight.shape != residual.shape[-1:] or weight.dtype not in (residual.dtype, torch.float32):
        raise UsageError(
            f"weight is {tuple(weight.shape)} {weight.dtype}; pass ({residual.shape[-1]},) of the input's type or "
            "float32"
        )
    if not isinstance(norm.eps, float | int) or not norm.eps >= 0:
        raise UsageError(f"eps={norm.eps!r} is not a number of at least 0; pass for example 1e-6")
    if norm.quantize not in QUANTS:
        raise UsageError(f"quantize={norm.quantize!r} is not one of {', '.join(QUANTS)}; use one of these")
    if (norm.quantize == "static") != (scale is not None):
        raise UsageError(f"quantize={norm.quantize!r} with scale {scale}; a scale goes with 'static', and only there")
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
        raise UsageError(f"scale is {tuple(scale.shape)} {scale.dtype}; pass one float32")
    for name, one in (("weight", weight), ("scale", scale)):
        if one is not None and one.device != residual.device:
            raise UsageError(f"{name} is on {one.device}, the residual on {residual.device}; move it there")
