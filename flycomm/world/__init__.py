# SPDX-License-Identifier: Apache-2.0
"""World: who the ranks are, and how they exchange small byte strings.

Over torch.distributed (any backend, subgroups), MPI, or threads of one process; neither torch.distributed nor mpi4py
is imported before a world needs it. Only bytes travel, never a pickle.
"""

from flycomm.world._base import World
from flycomm.world._local import LocalWorlds

__all__ = ["LocalWorlds", "World"]
