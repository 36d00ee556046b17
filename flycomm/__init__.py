# SPDX-License-Identifier: Apache-2.0
"""flycomm: communication between the GPUs of one node *inside* a kernel, for LLM decode.

Two ways to use it::

    import flycomm
    comm = flycomm.init()                       # under torchrun or mpirun; collective
    y = comm.all_reduce(x)                      # or torch.ops.flycomm.all_reduce(x, "sum", comm.group_name)

    import flycomm.primitives as fc             # in a FlyDSL kernel
    fc.post(call, partial, slot); fc.arrive(call); fc.wait(call); total = fc.take(call, partial, slot)

The map, in the order in which rooms may import each other:

================ =======================================================================================
errors, env      every exception; every ``FLYCOMM_*`` variable
epoch, dtypes,   plain arithmetic that host code, traced code and tests share
geometry, channel
targets          what differs between rocm, cuda and host
world            rank, size, and how ranks exchange bytes
memory           ``SymmetricBuffer``: memory that every rank has mapped
primitives       FlyDSL device components
kernels          one algorithm a file; ``SHIPPED`` lists every specialization
indexer          context parallelism of sparse-attention indexers
dispatch         ``select``: the plan of a call, the same on all ranks
channels         pads, staging and state of a communicator
ops              ``torch.ops.flycomm``
collectives,     the calls: from tensors to one launch
topk, fused
trace            what the blocks of all ranks did when
communicator     ``Communicator``: what a user holds
mono             several operations of a model in one launch
compile, bench,  ``python -m flycomm compile | bench | tune | litmus | doctor``
tune, litmus,
doctor
================ =======================================================================================

Importing this package loads neither FlyDSL nor a driver: names load their room when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from flycomm.communicator import Communicator
    from flycomm.memory import SymmetricBuffer
    from flycomm.start import init
    from flycomm.world import World

_ROOMS = {
    "Communicator": "flycomm.communicator",
    "SymmetricBuffer": "flycomm.memory",
    "World": "flycomm.world",
    "init": "flycomm.start",
}
__all__ = ["Communicator", "SymmetricBuffer", "World", "__version__", "init"]


def __getattr__(name: str) -> Any:
    room = _ROOMS.get(name)
    if room is None:
        raise AttributeError(f"module 'flycomm' has no attribute {name!r}")
    return getattr(importlib.import_module(room), name)
