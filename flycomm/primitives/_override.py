# SPDX-License-Identifier: Apache-2.0
"""A portable primitive that a target may override under the same name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any

from flydsl.compiler.backends import compile_backend_name

_OVERRIDES = {"rocm": "flycomm.primitives.rocm", "cuda": "flycomm.primitives.cuda"}


def overridable(portable: Callable[..., Any]) -> Callable[..., Any]:
    """Call the function of the same name in the module of the target being compiled for, else ``portable``.

    The portable form stays callable as ``.portable``. An override exists only where a measurement, or what a target
    cannot compile, demands it.
    """

    @wraps(portable)
    def choose(*args: Any, **kwargs: Any) -> Any:
        module = _OVERRIDES.get(compile_backend_name())
        override = getattr(importlib.import_module(module), portable.__name__, None) if module else None
        return (override or portable)(*args, **kwargs)

    choose.portable = portable  # type: ignore[attr-defined]
    return choose
