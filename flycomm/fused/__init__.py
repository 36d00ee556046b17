# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual + RMSNorm (+ 8 bits): one kernel where the table says that it pays, else one a step.

call       ``Fused``: the calls of one communicator
experts    ``ExpertRows``: what the sum is over in a mixture-of-experts layer, instead of one tensor
steps      the same arithmetic in torch, one kernel a step
"""

from flycomm.fused.call import Fused, Norm
from flycomm.fused.experts import ExpertRows

__all__ = ["ExpertRows", "Fused", "Norm"]
