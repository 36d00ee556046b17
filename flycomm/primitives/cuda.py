# SPDX-License-Identifier: Apache-2.0
"""What NVIDIA GPUs do differently, under the primitives' own names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm
from flydsl.compiler import get_backend

from flycomm import env
from flycomm.primitives import reduce
from flycomm.primitives._matrix_cuda import multiply as multiply
from flycomm.primitives._matrix_cuda import prepare as prepare
from flycomm.primitives._warpgroup_cuda import multiply_group as multiply_group
from flycomm.primitives._warpgroup_cuda import publish_operand as publish_operand
from flycomm.primitives.access import pointer

_EARLY_STARTS = 90  # the first chip that has them


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


def wait_for_previous() -> None:
    """Also for a kernel that was launched when the one ahead had ended: it costs a few cycles."""
    _grid_dependency("wait")


def let_next_start() -> None:
    _grid_dependency("launch_dependents")


def _grid_dependency(action: str) -> None:
    chip = int(get_backend().target.arch.removeprefix("sm_").rstrip("af"))
    if chip >= _EARLY_STARTS and env.PDL.get():
        llvm.inline_asm(None, [], f"griddepcontrol.{action};", "~{memory}", has_side_effects=True)


def rounded_sum(terms: Sequence[Any]) -> Any:
    """Two of bf16 are added by pairs of elements, with the one rounding of an fma: the same bits (NaN payloads aside).

    Where exponents differ by 16 or less f32 holds the sum exactly. Where they differ by more, the smaller term is under
    2^-16 of the larger one, and either way the larger one is the result.
    """
    if len(terms) != 2 or terms[0].dtype is not fx.BFloat16:
        return reduce.rounded_sum.portable(terms)  # type: ignore[attr-defined]
    own, other = (term.bitcast(fx.Uint32) for term in terms)
    zero = fx.Uint32(0)
    words = [_add_pair(_add_pair(own[i], zero), other[i]) for i in range(own.numel)]
    return fx.Vector.from_elements(words, fx.Uint32).bitcast(fx.BFloat16)


def _add_pair(left: Any, right: Any) -> Any:
    """``left * 1 + right`` of two bf16 in a word each."""
    values = [fx.Uint32(value).ir_value() for value in (left, 0x3F803F80, right)]
    return fx.Uint32(llvm.inline_asm(fx.Uint32.ir_type, values, "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r"))


def loads_before() -> None:
    """ptxas moves no load across it, and makes no instruction of it where a warp has not branched."""
    llvm.inline_asm(None, [], "bar.warp.sync 0xffffffff;", "~{memory}", has_side_effects=True)


def pause() -> None:
    """``nanosleep`` takes between nothing and twice the nanoseconds that it is given."""
    llvm.inline_asm(None, [], "nanosleep.u32 500;", "", has_side_effects=True)
