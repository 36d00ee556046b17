# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual + RMSNorm (+ 8 bits): one kernel where the table says that it pays, else one a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flycomm import kernels
from flycomm.collectives import NAMES, Collectives, tag_of
from flycomm.errors import UsageError
from flycomm.kernels._quantized import QUANTS
from flycomm.kernels.reduce_norm import Variant, each_thread, slot_bytes
from flycomm.layout import Routes, key_of
from flycomm.primitives.quant import GROUP, native
from flycomm.session import Session
from flycomm.tables import FUSED, Row
from flycomm.validate import ALIGNMENT, usable

_FLOOR = Variant.floor
Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


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

    def row_for(self, dtype: torch.dtype, rows: int, hidden: int, captured: bool) -> Row | None:
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
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        norm: Norm,
        scale: torch.Tensor | None,
        channel: int,
    ) -> Result:
        """``(normed, residual_out, codes, scales)``; the last two None without ``norm.quantize``."""
        session = self._session
        session.enter()
        session.check_device(x)
        _check(x, residual, weight, norm, scale)
        session.roll_call("all_reduce_norm", str(norm), tuple(x.shape), str(x.dtype))
        captured = session.is_capturing()
        hidden = x.shape[-1]
        rows = x.numel() // max(1, hidden)
        row = self.row_for(x.dtype, rows, hidden, captured)
        if row is None:
            return self._separately(x, residual, weight, norm, scale, channel)
        source, added, factor = (
            one if usable(one) else one.clone(memory_format=torch.contiguous_format) for one in (x, residual, weight)
        )
        normed, residual_out = torch.empty_like(source), torch.empty_like(source)
        codes, scales = self._outputs(x, norm, scale)
        launch = self._launch(row, source.dtype, factor.dtype, rows, hidden, norm, channel, captured)
        stream = session.stream()
        session.claim(channel, captured, stream)
        launch(
            source.data_ptr(),
            added.data_ptr(),
            factor.data_ptr(),
            residual_out.data_ptr(),
            normed.data_ptr(),
            codes.data_ptr() if codes is not None else 0,
            scales.data_ptr() if scales is not None else 0,
            stream,
        )
        session.target.raise_pending()
        return normed, residual_out, codes, scales

    def _launch(
        self,
        row: Row,
        dtype: torch.dtype,
        weight: torch.dtype,
        rows: int,
        hidden: int,
        norm: Norm,
        channel: int,
        captured: bool,
    ) -> Any:
        key = (FUSED[0], row, dtype, weight, rows, hidden, norm, channel, captured)
        launch = self._collectives.kept(key)
        if launch is None:
            session, name = self._session, NAMES[dtype]
            held = each_thread(hidden, name, row.threads) * row.threads * ALIGNMENT // dtype.itemsize
            other = "" if weight == dtype else NAMES[weight]
            variant = Variant(held, other, norm.gemma, norm.quantize, self._fp8)
            specialization = kernels.all_reduce_norm(session.world.size, name, row.geometry, row.protocol, variant)
            session.load(specialization)
            peers = session.peers(key_of(row, channel, captured))
            tag = tag_of(f"norm {norm}", str(dtype), rows * hidden, channel)
            fixed = (peers, tag, *(0,) * 7, rows, hidden, norm.eps, 0)
            launch = self._collectives.keep(key, kernels.bind(specialization, fixed, (2, 3, 4, 5, 6, 7, 8, 12)))
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
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        norm: Norm,
        scale: torch.Tensor | None,
        channel: int,
    ) -> Result:
        total = self._collectives.all_reduce(x, "sum", None, channel)
        if total is None:
            raise UsageError("all_reduce_rms_norm has no result without an all-reduce; use fallback='group' or 'error'")
        added = total.float() + residual.float()
        factor = weight.float() + 1.0 if norm.gemma else weight.float()
        rows = added * torch.rsqrt((added * added).mean(-1, keepdim=True) + norm.eps)
        normed = (rows * factor).to(x.dtype)
        codes, scales = self._outputs(x, norm, scale)
        if codes is not None:
            wide = normed.float()
            if norm.quantize != "static":
                scales = self._scales(wide, norm)
            assert scales is not None
            divisor = scales
            if norm.quantize == "token":
                divisor = scales[..., None]
            elif norm.quantize == "group":
                divisor = scales.repeat_interleave(GROUP, -1)[..., : x.shape[-1]]
            codes = (wide * (1.0 / divisor)).clamp(-self._fp8.largest, self._fp8.largest).to(self.fp8)
        return normed, added.to(x.dtype), codes, scales

    def _scales(self, wide: torch.Tensor, norm: Norm) -> torch.Tensor:
        size = GROUP if norm.quantize == "group" else wide.shape[-1]
        groups = torch.nn.functional.pad(wide, (0, -wide.shape[-1] % size)).unflatten(-1, (-1, size))
        scales = (groups.abs().amax(-1) / self._fp8.largest).clamp(min=_FLOOR)
        return scales.squeeze(-1) if norm.quantize == "token" else scales


def _check(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, norm: Norm, scale: torch.Tensor | None
) -> None:
    if x.dim() == 0 or residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device:
        raise UsageError(
            f"residual is {tuple(residual.shape)} {residual.dtype} on {residual.device}, the input {tuple(x.shape)} "
            f"{x.dtype} on {x.device}; pass a residual that is like the input"
        )
    if weight.shape != x.shape[-1:] or weight.dtype not in (x.dtype, torch.float32) or weight.device != x.device:
        raise UsageError(
            f"weight is {tuple(weight.shape)} {weight.dtype} on {weight.device}; pass ({x.shape[-1]},) of the input's "
            "type or float32, on its device"
        )
    if norm.quantize not in QUANTS:
        raise UsageError(f"quantize={norm.quantize!r} is not one of {', '.join(QUANTS)}; use one of these")
    if (norm.quantize == "static") != (scale is not None):
        raise UsageError(f"quantize={norm.quantize!r} with scale {scale}; a scale goes with 'static', and only there")
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != x.device):
        raise UsageError(f"scale is {tuple(scale.shape)} {scale.dtype}; pass one float32 on the input's device")
