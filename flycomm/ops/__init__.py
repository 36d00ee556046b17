# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.flycomm``: the collectives as torch ops, addressed by ``group_name`` as torch's own are.

=============================================================================== ==================================
``all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor``           a new, contiguous tensor
``all_reduce_(Tensor(a!) input, str reduce_op, str group_name) -> ()``           in place
``all_reduce_out(Tensor input, str reduce_op, str group_name, *, Tensor(a!) out) -> ()``
``barrier(str group_name) -> ()``, ``put_signal(int dst_rank, int channel, str group_name) -> ()``,
``wait_signal(int src_rank, int channel, str group_name) -> ()``                 eager only: no tensor orders them
=============================================================================== ==================================

Registered with ``Library.define`` and ``impl``: half the call cost of ``custom_op``. An in-place op returns nothing: an
alias annotation on a return fails under ``torch.compile``. None has an autograd formula.
"""

from __future__ import annotations

import torch

from flycomm.ops.registry import lookup

_library = torch.library.Library("flycomm", "DEF")


def _all_reduce(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    return lookup(group_name).all_reduce(input, reduce_op)


def _all_reduce_(input: torch.Tensor, reduce_op: str, group_name: str) -> None:
    lookup(group_name).all_reduce_(input, reduce_op)


def _all_reduce_out(input: torch.Tensor, reduce_op: str, group_name: str, *, out: torch.Tensor) -> None:
    lookup(group_name).all_reduce(input, reduce_op, out=out)


def _barrier(group_name: str) -> None:
    lookup(group_name).barrier()


def _put_signal(dst_rank: int, channel: int, group_name: str) -> None:
    lookup(group_name).put_signal(dst_rank, channel)


def _wait_signal(src_rank: int, channel: int, group_name: str) -> None:
    lookup(group_name).wait_signal(src_rank, channel)


_SCHEMAS = (
    ("all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor", _all_reduce),
    ("all_reduce_(Tensor(a!) input, str reduce_op, str group_name) -> ()", _all_reduce_),
    ("all_reduce_out(Tensor input, str reduce_op, str group_name, *, Tensor(a!) out) -> ()", _all_reduce_out),
    ("barrier(str group_name) -> ()", _barrier),
    ("put_signal(int dst_rank, int channel, str group_name) -> ()", _put_signal),
    ("wait_signal(int src_rank, int channel, str group_name) -> ()", _wait_signal),
)
for _schema, _implementation in _SCHEMAS:
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _implementation, "CompositeExplicitAutograd")


@torch.library.register_fake("flycomm::all_reduce", lib=_library)
def _(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@torch.library.register_fake("flycomm::all_reduce_", lib=_library)
def _(input: torch.Tensor, reduce_op: str, group_name: str) -> None:
    return None


@torch.library.register_fake("flycomm::all_reduce_out", lib=_library)
def _(input: torch.Tensor, reduce_op: str, group_name: str, *, out: torch.Tensor) -> None:
    return None
