# SPDX-License-Identifier: Apache-2.0
"""The one table of element types that collectives reduce."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DType:
    """``name`` is what commands and tables say; ``torch_name`` and ``fx_name`` are attributes of torch and FlyDSL."""

    name: str
    torch_name: str
    fx_name: str
    num_bytes: int

    @property
    def per_fragment(self) -> int:
        """Elements in a fragment of 16 bytes."""
        return 16 // self.num_bytes


REDUCIBLE: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("f32", "float32", "Float32", 4),
        DType("f16", "float16", "Float16", 2),
        DType("bf16", "bfloat16", "BFloat16", 2),
    )
}

REDUCTIONS = ("sum", "avg", "max", "min")
