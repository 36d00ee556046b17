# SPDX-License-Identifier: Apache-2.0
"""All-reduce, reduce-scatter and all-gather as ops; contracts in :class:`flycomm.communicator.Communicator`."""

from __future__ import annotations

from typing import Any

import torch

from flycomm.errors import UsageError
from flycomm.ops._library import nothing, op
from flycomm.ops.registry import lookup
from flycomm.validate import check_gathered, check_scattered


def _like(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _chunk(input: torch.Tensor, reduce_op: str, group_size: int, group_name: str) -> torch.Tensor:
    return input.new_empty(check_scattered(input, group_size))


def _gathered(input: torch.Tensor, group_size: int, group_name: str, dim: int = 0) -> torch.Tensor:
    return input.new_empty(check_gathered(input, group_size, dim)[0])


def _of_size(group_name: str, group_size: int) -> Any:
    communicator = lookup(group_name)
    if communicator.world_size != group_size:
        raise UsageError(
            f"group_size={group_size} is not the {communicator.world_size} ranks of {group_name!r}; pass its size"
        )
    return communicator


@op("all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor", _like)
def all_reduce(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    return lookup(group_name).all_reduce(input, reduce_op)


@op("all_reduce_(Tensor(a!) input, str reduce_op, str group_name) -> ()", nothing)
def all_reduce_(input: torch.Tensor, reduce_op: str, group_name: str) -> None:
    lookup(group_name).all_reduce_(input, reduce_op)


@op("all_reduce_out(Tensor input, str reduce_op, str group_name, *, Tensor(a!) out) -> ()", nothing)
def all_reduce_out(input: torch.Tensor, reduce_op: str, group_name: str, *, out: torch.Tensor) -> None:
    lookup(group_name).all_reduce(input, reduce_op, out)


@op("reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, str group_name) -> Tensor", _chunk)
def reduce_scatter_tensor(input: torch.Tensor, reduce_op: str, group_size: int, group_name: str) -> torch.Tensor:
    return _of_size(group_name, group_size).reduce_scatter_tensor(input, reduce_op)


@op(
    "reduce_scatter_tensor_out(Tensor input, str reduce_op, int group_size, str group_name, *, Tensor(a!) out) -> ()",
    nothing,
)
def reduce_scatter_tensor_out(
    input: torch.Tensor, reduce_op: str, group_size: int, group_name: str, *, out: torch.Tensor
) -> None:
    _of_size(group_name, group_size).reduce_scatter_tensor(input, reduce_op, out)


@op("all_gather_into_tensor(Tensor input, int group_size, str group_name, int dim=0) -> Tensor", _gathered)
def all_gather_into_tensor(input: torch.Tensor, group_size: int, group_name: str, dim: int = 0) -> torch.Tensor:
    return _of_size(group_name, group_size).all_gather_into_tensor(input, dim=dim)


@op(
    "all_gather_into_tensor_out(Tensor input, int group_size, str group_name, int dim=0, *, Tensor(a!) out) -> ()",
    nothing,
)
def all_gather_into_tensor_out(
    input: torch.Tensor, group_size: int, group_name: str, dim: int = 0, *, out: torch.Tensor
) -> None:
    _of_size(group_name, group_size).all_gather_into_tensor(input, out, dim)
