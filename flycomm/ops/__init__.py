# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.flycomm``: the collectives as torch ops, addressed by ``group_name`` as torch's own are.

=============================================================================== ==================================
``all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor``           a new, contiguous tensor
``all_reduce_(Tensor(a!) input, str reduce_op, str group_name) -> ()``           in place
``all_reduce_out(Tensor input, str reduce_op, str group_name, *, Tensor(a!) out) -> ()``
``reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, str group_name) -> Tensor``
``reduce_scatter_tensor_out(…, *, Tensor(a!) out) -> ()``                       into ``out``
``all_gather_into_tensor(Tensor input, int group_size, str group_name, int dim=0) -> Tensor``
``all_gather_into_tensor_out(…, *, Tensor(a!) out) -> ()``                      into ``out``
``all_reduce_rms_norm(Tensor input, Tensor residual, Tensor weight, float eps, bool gemma, str group_name)
-> (Tensor, Tensor)``                                                           normed, residual out
``all_reduce_rms_norm_quant(…, str quantize, Tensor? scale, …) -> (Tensor, Tensor, Tensor)``  8 bits, scales, residual
``moe_finalize_all_reduce_rms_norm(Tensor expert_out, Tensor topk_weights, Tensor residual, Tensor weight,
Tensor? index, Tensor? shared, float eps, bool gemma, str group_name) -> (Tensor, Tensor)``, ``…_quant``: of experts
``barrier(str group_name) -> ()``, ``put_signal(int dst_rank, int channel, str group_name) -> ()``,
``wait_signal(int src_rank, int channel, str group_name) -> ()``                 eager only: no tensor orders them
``topk(Tensor scores, int k, Tensor? lengths=None, …) -> (Tensor, Tensor, Tensor)`` of one device, with no group
``topk_exchange(Tensor scores, Tensor? lengths, int k, str group_name, …) -> (Tensor, Tensor, Tensor)``  of all ranks
=============================================================================== ==================================

An in-place op returns nothing: an alias annotation on a return fails under ``torch.compile``. Names and arguments are
those of torch's own functional collectives, where it has them.
"""

from flycomm.ops import collectives, exchange, experts, fused, signals, topk

__all__ = ["collectives", "exchange", "experts", "fused", "signals", "topk"]
