# SPDX-License-Identifier: Apache-2.0
"""Every ``FLYCOMM_*`` environment variable, in one place. Read at use, so tests may set them.

``python -m flycomm doctor`` prints this table with the values in force.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from flycomm.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable: ``get()`` parses it, or gives ``default`` when it is unset."""

    name: str
    parse: Callable[[str], T]
    default: T
    meaning: str

    def get(self) -> T:
        raw = os.environ.get(self.name)
        if raw is None or raw == "":
            return self.default
        try:
            return self.parse(raw)
        except ValueError as error:
            raise UsageError(f"{self.name}={raw!r} is not understood ({error}); {self.meaning}") from None


def _flag(raw: str) -> bool:
    lowered = raw.lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError("use 1 or 0")


def _choice(*names: str) -> Callable[[str], str]:
    def parse(raw: str) -> str:
        if raw.lower() not in names:
            raise ValueError(f"use one of {', '.join(names)}")
        return raw.lower()

    return parse


def _one_of_ints(*values: int) -> Callable[[str], int]:
    def parse(raw: str) -> int:
        if int(raw) not in values:
            raise ValueError(f"use one of {', '.join(map(str, values))}")
        return int(raw)

    return parse


HOST_ORDERS = ("fair", "first", "last", "rotate")  # as in the C library's enum fc_host_order

TARGET = Variable("FLYCOMM_TARGET", _choice("rocm", "cuda", "host"), "", "target to run on: rocm, cuda or host")
TIMEOUT = Variable("FLYCOMM_TIMEOUT", float, 30.0, "seconds that a wait inside a kernel may last; 0 waits for ever")
DEBUG = Variable("FLYCOMM_DEBUG", _flag, False, "1 compares every call's arguments across ranks before it is launched")
SHIM = Variable("FLYCOMM_SHIM", str, "", "path of libflycomm_shim.so, instead of the one in the package")
CUDA_SHARING = Variable(
    "FLYCOMM_CUDA_SHARING",
    _choice("auto", "ipc", "fd"),
    "auto",
    "how ranks share memory: ipc, fd (file descriptors), or auto: fd where ipc is refused (cuda)",
)
TABLE = Variable(
    "FLYCOMM_TABLE",
    str,
    "",
    "dispatch table (JSON) that rank 0 reads; shipped: the one that came with flycomm, also if tune wrote another",
)
AOT_DIR = Variable(
    "FLYCOMM_AOT_DIR",
    str,
    "",
    "folder that python -m flycomm compile wrote: kernels in it are loaded, not compiled (rocm, cuda)",
)
PDL = Variable(
    "FLYCOMM_PDL",
    _flag,
    True,
    "1 launches small kernels while the one ahead of them still runs, 0 when it has ended (cuda, from sm_90 on)",
)
HOST_WEAK = Variable("FLYCOMM_HOST_WEAK", _flag, False, "1 lets stores to peers land late and out of order (host)")
HOST_SEED = Variable("FLYCOMM_HOST_SEED", int, 1, "seed of the weak mode's order (host)")
HOST_ORDER = Variable(
    "FLYCOMM_HOST_ORDER",
    _choice(*HOST_ORDERS),
    HOST_ORDERS[0],
    "which warp of a block runs on first after a block barrier: fair (all in turn), first, last or rotate (host)",
)
HOST_WARP = Variable("FLYCOMM_HOST_WARP", _one_of_ints(32, 64), 32, "threads of a warp: 32 or 64 (host)")
HOST_THREADS = Variable("FLYCOMM_HOST_THREADS", int, 0, "OS threads that run one launch's blocks; 0: the cores (host)")

ALL: tuple[Variable, ...] = (
    TARGET,
    TIMEOUT,
    DEBUG,
    SHIM,
    CUDA_SHARING,
    TABLE,
    AOT_DIR,
    PDL,
    HOST_WEAK,
    HOST_SEED,
    HOST_ORDER,
    HOST_WARP,
    HOST_THREADS,
)
