# SPDX-License-Identifier: Apache-2.0
"""What a top-k must give, in NumPy, and the scores it is tried on."""

from __future__ import annotations

import numpy as np

KINDS = (
    "normal",
    "relu",
    "constant",
    "levels",
    "narrow",
    "zeros",
    "infinities",
    "some nan",
    "all nan",
    "all -inf",
    "denormals",
    "rising",
    "clustered",
)


def scores(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """(rows, columns) f32 of one of :data:`KINDS`."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)).astype(np.float32)
    if kind == "relu":
        x = np.maximum(x, np.float32(0))
    elif kind == "constant":
        x[:] = np.float32(1.5)
    elif kind == "levels":
        x = rng.integers(-4, 4, (rows, columns)).astype(np.float32)
    elif kind == "narrow":  # one exponent, few leading mantissa bits
        x = (1 + 0.245 * rng.random((rows, columns))).astype(np.float32)
    elif kind == "zeros":
        x = np.where(x < 0, np.float32(-0.0), np.float32(0.0))
    elif kind == "infinities":
        x = np.where(x > 1, np.float32(np.inf), np.where(x < -1, np.float32(-np.inf), x))
    elif kind == "some nan":
        x = np.where(rng.random((rows, columns)) < 0.06, _nan(rng, (rows, columns)), x)
    elif kind == "all nan":
        x = _nan(rng, (rows, columns))
    elif kind == "all -inf":
        x[:] = -np.inf
    elif kind == "denormals":
        x = (rng.integers(-(2**22), 2**22, (rows, columns)) * np.float64(2.0**-149)).astype(np.float32)
    elif kind == "rising":
        x = np.sort(x, axis=1)
    elif kind == "clustered":  # the best are neighbours
        x[:, columns // 3 : columns // 3 + columns // 8] += 10
    elif kind != "normal":
        raise ValueError(kind)
    return x


def _nan(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """NaNs of both signs and many payloads."""
    bits = rng.integers(0x7F800001, 0x80000000, shape) | (rng.integers(0, 2, shape) << 31)
    return bits.astype(np.uint32).view(np.float32)


def topk(
    x: np.ndarray,  # (rows, columns) f32
    k: int,
    lengths: np.ndarray | None = None,  # (rows,); None: all columns
    order: str = "score",
    tie_break: str = "low",
    ids: np.ndarray | None = None,  # (rows, columns) what the columns are called; None: their number
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """f32 scores and i32 ids (rows, k), i32 counts (rows,). Sorts everything."""
    rows, columns = x.shape
    best = np.full((rows, k), -np.inf, np.float32)
    found = np.full((rows, k), -1, np.int32)
    counts = np.zeros(rows, np.int32)
    for row in range(rows):
        length = columns if lengths is None else min(max(int(lengths[row]), 0), columns)
        value = x[row, :length]
        value = np.where(np.isnan(value), np.float32(-np.inf), value) + np.float32(0)  # -0 + 0 is +0
        name = np.arange(length) if ids is None else ids[row, :length]
        chosen = np.lexsort((name if tie_break == "low" else -name, -value))[:k]
        if order == "index":
            chosen = chosen[np.argsort(name[chosen])]
        counts[row] = chosen.size
        best[row, : chosen.size] = value[chosen]
        found[row, : chosen.size] = name[chosen]
    return best, found, counts
