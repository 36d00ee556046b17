# SPDX-License-Identifier: Apache-2.0
"""The one way in which an op is registered: its schema, its implementation and its fake, side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("flycomm", "DEF")


def op(schema: str, fake: Callable[..., Any] | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the op of that schema; ``fake`` gives its outputs without data.

    By ``Library.define`` and ``impl``: half the call cost of ``custom_op``. No op has an autograd formula. One without
    a fake cannot be traced by the compiler.
    """

    def register(implementation: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        _library.define(schema)
        _library.impl(name, implementation, "CompositeExplicitAutograd")
        if fake is not None:
            torch.library.register_fake(f"flycomm::{name}", fake, lib=_library)
        return implementation

    return register


def nothing(*_: Any, **__: Any) -> None:
    """The fake of an op that writes into what it is given."""
