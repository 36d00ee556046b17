# SPDX-License-Identifier: Apache-2.0
"""What the mono layers have in common before anything is traced: classes of rows, protocols, staging slots."""

from typing import Protocol

from flycomm.errors import UsageError

ROWS = (1, 2, 4, 8, 16, 32, 48)  # classes: a launch takes up to so many
PROTOCOLS = ("flags", "packets")
MATHS = ("auto", "dot", "matrix")
DOT_ROWS = 16  # the most by dot products
_MATRIX_FROM = 4  # rows for which "auto" takes matrix instructions: on an H200 half the time of dot products


class MonoLayer(Protocol):
    """A layer that reduces rows of ``hidden`` bf16 over the ranks, up to ``rows`` of them, by ``protocol``."""

    @property
    def hidden(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def protocol(self) -> str: ...

    @property
    def math(self) -> str: ...


def by_matrix(layer: MonoLayer) -> bool:
    """Whether products are made by matrix instructions, :mod:`flycomm.primitives.block_product`; else by ``dot``."""
    return layer.math == "matrix" or (layer.math == "auto" and layer.rows >= _MATRIX_FROM)


def check_layer(layer: MonoLayer, dtype: str, threads: int) -> None:
    """Raise :class:`UsageError` for what no mono layer can do."""
    if dtype != "bf16":
        raise UsageError(f"dtype {dtype!r} is not bf16, which this layer is in; cast to it")
    if layer.rows not in ROWS or layer.protocol not in PROTOCOLS:
        raise UsageError(
            f"{layer.rows} rows by {layer.protocol!r}; take one of {ROWS} rows, by one of {', '.join(PROTOCOLS)}"
        )
    if layer.math not in MATHS or (layer.math == "dot" and layer.rows > DOT_ROWS):
        raise UsageError(
            f"{layer.rows} rows with math={layer.math!r}; take one of {', '.join(MATHS)}, dot up to {DOT_ROWS} rows"
        )
    if threads < 64 or threads % 64:
        raise UsageError(f"a block of {threads} threads is not a number of waves; use a multiple of 64")


def slot_bytes(layer: MonoLayer) -> int:
    """Of a staging slot: ``kernel_channels={name: (blocks, slot_bytes(layer))}``."""
    return layer.rows * layer.hidden * (4 if layer.protocol == "packets" else 2)
