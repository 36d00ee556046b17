# SPDX-License-Identifier: Apache-2.0
"""Which communicator a ``group_name`` means, for ``torch.ops.flycomm``."""

from __future__ import annotations

import threading
from typing import Any

from flycomm.errors import UsageError

_communicators: dict[str, Any] = {}
_lock = threading.Lock()


def register(name: str, communicator: Any) -> None:
    """Bind a name; raises :class:`UsageError` if it is bound already."""
    with _lock:
        if name in _communicators:
            raise UsageError(f"a communicator named {name!r} exists already; close it, or pass another name= to init")
        _communicators[name] = communicator


def unregister(name: str) -> None:
    with _lock:
        _communicators.pop(name, None)


def lookup(name: str) -> Any:
    """The communicator of that name; raises :class:`UsageError` with the names that exist."""
    found = _communicators.get(name)
    if found is None:
        known = ", ".join(map(repr, sorted(_communicators))) or "none"
        raise UsageError(f"no communicator is named {name!r} (there are: {known}); call flycomm.init first")
    return found
