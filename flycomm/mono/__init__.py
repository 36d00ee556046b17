# SPDX-License-Identifier: Apache-2.0
"""Mono kernels: several operations of a model in one launch, their reductions in the middle. See docs/mono_kernels.md.

``FfnLayer``: gate/up, SiLU, down, all-reduce, residual, RMSNorm and the next projection.
"""

from flycomm.mono.ffn import FfnLayer

__all__ = ["FfnLayer"]
