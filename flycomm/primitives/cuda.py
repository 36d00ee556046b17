# SPDX-License-Identifier: Apache-2.0
"""What NVIDIA GPUs do differently, under the primitives' own names."""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm

from flycomm.primitives._matrix_cuda import multiply as multiply
from flycomm.primitives._matrix_cuda import prepare as prepare
from flycomm.primitives.access import pointer


def wait_own_stores() -> None:
    """Nothing: a block barrier and a release at system scope are cumulative over the whole block's stores (PTX)."""


def acquire(address: Any) -> None:
    """Read the word again, with acquire: a fence would also wait until this thread's own flag stores are through."""
    fx.generic_load(pointer(address, fx.Uint64, 8), dtype=fx.Uint64, memory_order=fx.AtomicOrdering.Acquire)


def store_pair(address: Any, low: Any, high: Any) -> None:
    """One 16-byte instruction: two of 8 bytes are not merged, and cost two trips through the load-store unit."""
    values = [fx.Int64(address).ir_value(), fx.Uint64(low).ir_value(), fx.Uint64(high).ir_value()]
    llvm.inline_asm(
        None, values, "st.relaxed.sys.global.v2.b64 [$0], {$1, $2};", "l,l,l,~{memory}", has_side_effects=True
    )


def load_pair(address: Any) -> Any:
    """One 16-byte instruction."""
    word = fx.Uint64.ir_type
    pair = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({word}, {word})>"),
        [fx.Int64(address).ir_value()],
        "ld.relaxed.sys.global.v2.b64 {$0, $1}, [$2];",
        "=l,=l,l,~{memory}",
        has_side_effects=True,
    )
    return tuple(fx.Uint64(llvm.extractvalue(word, pair, [half])) for half in range(2))


def pause() -> None:
    """``nanosleep`` takes between nothing and twice the nanoseconds that it is given."""
    llvm.inline_asm(None, [], "nanosleep.u32 500;", "", has_side_effects=True)
