# SPDX-License-Identifier: Apache-2.0
"""The mono feed-forward layer: flycomm's one launch, its inputs, and what must come out.

Four layers' weights take turns, so that none rests in a cache: 2 * intermediate * hidden of gate and up, hidden *
intermediate of down and projection * hidden of what follows, on every rank. Both results are compared with the
same layer in f32 on the CPU, which rounds nothing: they may be off by 2**-6 of the largest element, and ``out`` by
2**-7 of its norm, since data are rounded to bf16 three times on the way to it, in a baseline five times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F

import flycomm
from flycomm.bench.contender import Contender, Context
from flycomm.bench.problem import BUFFERS, Case
from flycomm.bench.reference import Verdict, make_input, worst
from flycomm.errors import UsageError
from flycomm.geometry import Geometry
from flycomm.kernels.mono_ffn import MATHS, ROWS, Layer, slot_bytes
from flycomm.mono import FfnLayer

EPS = 1e-6
_CHANNEL, _MAX_BYTES = "mono_ffn", 64 << 20
_GPU_BLOCKS, _GPU_THREADS = 128, 256
_HOST = Geometry(2, 64)
_SHARED = 1000  # instead of a rank, for what is the same on all ranks


class MonoInput(NamedTuple):
    x: torch.Tensor  # (rows, hidden), the same on all ranks, as the next two
    residual: torch.Tensor  # (rows, hidden)
    norm_weight: torch.Tensor  # (hidden,)
    gate_up: torch.Tensor  # (2 * intermediate, hidden), of this rank, as the next two
    down: torch.Tensor  # (hidden, intermediate)
    projection: torch.Tensor  # (columns, hidden)
    grid: str | None  # "128x256", "128x256/dot", or None for the default


@lru_cache(maxsize=2)
def _weights(
    world: int, buffer: int, hidden: int, intermediate: int, projection: int
) -> list[tuple[torch.Tensor, ...]]:
    """``(gate_up, down, projection)`` of every rank, on the CPU. Made once: rows differ more often than shapes."""
    shapes = (2 * intermediate, hidden), (hidden, intermediate), (projection, hidden)
    return [
        tuple(
            make_input(10 * rank + n, buffer, rows * columns, torch.float32).view(rows, columns).mul_(columns**-0.5)
            for n, (rows, columns) in enumerate(shapes)
        )
        for rank in range(world)
    ]


def check(case: Case) -> None:
    """Raise :class:`UsageError` for what the layer cannot be."""
    rows = case.rows or 0
    _math(case.grid)
    if case.grid is not None:
        _geometry(case.grid)
    if case.dtype != "bf16":
        raise UsageError(f"--dtype {case.dtype} is not bf16, which the mono layer is in; use bf16")
    if rows > ROWS[-1]:
        raise UsageError(f"--rows {rows} is over the {ROWS[-1]} of the mono layer's largest class; use at most that")
    _layer(case).check(case.dtype, _HOST.threads)


def _layer(case: Case) -> Layer:
    held = next(known for known in ROWS if known >= (case.rows or 0))
    return Layer(case.hidden or 0, case.intermediate or 0, case.projection or 0, held, math=_math(case.grid))


class MonoProblem:
    """Inputs on the device, and on the CPU what their results must be, one of each a buffer."""

    def __init__(self, context: Context, case: Case):
        rows, hidden, intermediate = case.rows or 0, case.hidden or 0, case.intermediate or 0
        check(case)
        self.inputs: list[MonoInput] = []
        self._expected: list[tuple[torch.Tensor, torch.Tensor]] = []
        for buffer in range(BUFFERS):
            shapes = (rows, hidden), (rows, hidden), (hidden,)
            shared = [
                make_input(_SHARED + n, buffer, torch.Size(shape).numel(), torch.bfloat16).view(shape)
                for n, shape in enumerate(shapes)
            ]
            ranks = [
                [one.bfloat16() for one in weights]
                for weights in _weights(context.world.size, buffer, hidden, intermediate, case.projection or 0)
            ]
            own = ranks[context.world.rank]
            self.inputs.append(MonoInput._make([*(one.to(context.device) for one in (*shared, *own)), case.grid]))
            self._expected.append(expected(shared, ranks, own[2]))

    def judge(self, results: dict[int, tuple[torch.Tensor, torch.Tensor]], exact: bool) -> Verdict:
        """The same for flycomm and for baselines: both round."""
        return worst([self._judge(index, *found) for index, found in results.items()])

    def _judge(self, index: int, *found: torch.Tensor) -> Verdict:
        off, right = 0.0, True
        for one, want, of_norm in zip(found, self._expected[index], (2.0**-7, 2.0**-6), strict=True):
            difference = (one.cpu().float() - want).nan_to_num(nan=float("inf"))
            off = max(off, float(difference.abs().max()))
            right &= bool(difference.abs().max() <= 2.0**-6 * want.abs().max())
            right &= bool(difference.norm() <= of_norm * want.norm())
        return Verdict(right, off)


def expected(
    shared: Sequence[torch.Tensor], ranks: Sequence[Sequence[torch.Tensor]], projection: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, residual_out)`` in f32, of CPU tensors: x, residual and norm weight, and the weights of every rank."""
    x, residual, norm_weight = shared
    total = residual.float()
    for gate_up, down, _ in ranks:
        gate, up = (x.float() @ gate_up.float().T).chunk(2, dim=1)
        total = total + (F.silu(gate) * up) @ down.float().T
    return F.rms_norm(total, norm_weight.shape, norm_weight.float(), EPS) @ projection.float().T, total


class FlycommMono(Contender):
    """With a communicator of its own, whose one kernel channel may have the whole device."""

    name = "flycomm"
    does: ClassVar = {"mono_ffn": (None,)}

    def prepare(self, context: Context, inputs: Sequence[MonoInput]) -> None:
        rows, hidden = inputs[0].x.shape
        held = min(known for known in ROWS if known >= rows)
        layer = Layer(hidden, inputs[0].down.shape[1], inputs[0].projection.shape[0], held, math=_math(inputs[0].grid))
        grid = _grid(context, inputs[0].grid)
        self._comm = flycomm.init(
            context.group,
            world=context.world,
            target=context.target.name,
            name=f"{context.comm.group_name} mono",
            max_bytes=_MAX_BYTES,
            timeout=context.timeout,
            fallback="error",
            kernel_channels={_CHANNEL: (grid.blocks, slot_bytes(layer))},
        )
        self._layer = FfnLayer(self._comm, _CHANNEL, layer, grid.threads)
        self._inputs = list(inputs)

    def call(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual, norm_weight, gate_up, down, projection, _ = self._inputs[index]
        return self._layer(x, residual, gate_up, down, norm_weight, projection, EPS)

    def release(self, context: Context) -> None:
        del self._layer
        self._comm.close()


def _grid(context: Context, asked: str | None) -> Geometry:
    if asked is None:
        if context.target.name == "host":
            return _HOST
        units = context.target.capabilities(context.world.device).compute_units
        return Geometry(min(_GPU_BLOCKS, units - 1), _GPU_THREADS)
    return _geometry(asked)


def _geometry(asked: str) -> Geometry:
    blocks, _, threads = asked.partition("/")[0].partition("x")
    if not (blocks.isdecimal() and threads.isdecimal()):
        raise UsageError(f"--grid {asked} is not BLOCKSxTHREADS; write it as in 128x256, or 128x256/dot")
    return Geometry(int(blocks), int(threads))


def _math(asked: str | None) -> str:
    """How the layer multiplies, which may follow the grid: what is best depends on both."""
    found = (asked or "").partition("/")[2] or Layer.math
    if found not in MATHS:
        raise UsageError(f"--grid {asked} ends in {found!r}; after / write one of {', '.join(MATHS)}")
    return found


def protocol(context: Context, case: Case, captured: bool) -> str:
    """And the grid."""
    grid = _grid(context, case.grid)
    return f"{Layer.protocol} {grid.blocks}x{grid.threads}"


def weight_bytes(case: Case, world: int) -> int:
    """That one call reads on a rank: what bounds a layer of few rows. Sizes are a rank's, so whatever the world."""
    return 2 * (case.hidden or 0) * (3 * (case.intermediate or 0) + (case.projection or 0))
