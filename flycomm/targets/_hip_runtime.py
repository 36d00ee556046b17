# SPDX-License-Identifier: Apache-2.0
"""The one HIP runtime of this process, as FlyDSL's runtime library sees it, and what its launches could not say.

FlyDSL's library is linked against ``libamdhip64.so.7``. The dynamic linker gives it the copy that torch has loaded, if
that is called so, and otherwise looks for another one: then two runtimes would be in the process, and a stream of one
means nothing to the other. That is found here, before a kernel runs.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import flydsl

from flycomm.errors import TargetError

_LIBRARY = "libfly_jit_runtime.so"
_PREFIX = "libamdhip64"  # how the file of a HIP runtime is called, torch's own copy too
_MAPS = Path("/proc/self/maps")


@cache
def library() -> ctypes.CDLL:
    """FlyDSL's runtime library. Call it when the HIP runtime is loaded.

    Raises :class:`TargetError` when it does not load, or brings a second HIP runtime.
    """
    path = Path(flydsl.__file__).with_name("_mlir") / "_mlir_libs" / _LIBRARY
    before = copies()
    try:
        found = ctypes.CDLL(str(path))
        take_error = found.flydslRuntimeTakeError
    except (OSError, AttributeError) as error:
        raise TargetError(f"FlyDSL's HIP library cannot be used ({error}); install ROCm 7") from error
    now = copies()
    if len(now) > 1:
        first = (before or now)[0]
        raise TargetError(
            f"this process has {len(now)} HIP runtimes ({', '.join(now)}), and streams of one mean nothing to another; "
            f"start it with LD_PRELOAD={first}, or install a torch for the ROCm of this machine"
        )
    take_error.restype, take_error.argtypes = ctypes.c_int, []
    return found


def copies() -> list[str]:
    """The files of all HIP runtimes in this process, one name each."""
    found: dict[tuple[str, str], str] = {}  # by device and inode: a file may have many names
    for line in _MAPS.read_text().splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].rpartition("/")[2].startswith(_PREFIX):
            found.setdefault((words[3], words[4]), words[5])
    return list(found.values())


def take_error() -> str:
    """What was wrong with this thread's first failed load or launch since the last call; empty if nothing was."""
    code = library().flydslRuntimeTakeError()
    if code == 0:
        return ""
    words = []
    for function in (library().hipDrvGetErrorString, library().hipDrvGetErrorName):  # of the runtime it is bound to
        text = ctypes.c_char_p()
        function(code, ctypes.byref(text))
        words.append((text.value or b"unknown").decode(errors="replace"))
    return f"{words[0]} ({words[1]}, code {code})"
