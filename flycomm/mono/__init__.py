# SPDX-License-Identifier: Apache-2.0
"""Mono kernels: several operations of a model in one launch, their reductions in the middle. See docs/mono_kernels.md.

``FfnLayer``: gate/up, SiLU, down, all-reduce, residual, RMSNorm and the next projection.
``AttentionOutLayer``: attention's output projection, all-reduce, residual, RMSNorm, router and top-k: a ``Routed``.
``IndexerLayer``: a context-parallel indexer's scores, exchange and selection, and a projection: an ``Indexed``.
``Runner``: such a layer or separate kernels, the same on all ranks; ``Step``, ``Rule`` and ``FfnLayout`` or
``AttentionOutLayout`` tell it what.
"""

from flycomm.mono.attention_out import AttentionOutLayer, Routed
from flycomm.mono.choice import AttentionOutLayout, FfnLayout, Rule, Step
from flycomm.mono.ffn import FfnLayer
from flycomm.mono.indexer import Indexed, IndexerLayer
from flycomm.mono.runner import Runner

__all__ = [
    "AttentionOutLayer",
    "AttentionOutLayout",
    "FfnLayer",
    "FfnLayout",
    "Indexed",
    "IndexerLayer",
    "Routed",
    "Rule",
    "Runner",
    "Step",
]
