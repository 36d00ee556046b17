# SPDX-License-Identifier: Apache-2.0
"""The host's side of a top-k over scores that are spread over the ranks.

call     the call: outputs, a channel, a kernel, a launch
choice   which algorithm: a pure function of what all ranks pass alike
checks   what a caller may pass
"""

from flycomm.topk.call import topk_exchange

__all__ = ["topk_exchange"]
