# SPDX-License-Identifier: Apache-2.0
"""FlyDSL's insides, as far as launches need them: the one place that knows them, each use checked.

FlyDSL has public ways to compile and to call, none to call without packing every argument anew, and none to find
compiled code without tracing the kernel first. When a later FlyDSL differs, these functions raise :class:`TargetError`.
"""

from __future__ import annotations

import ctypes
import hashlib
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flydsl.compiler import get_backend, jit_function
from flydsl.utils import env as flydsl_env

from flycomm.errors import TargetError

Slot = tuple[int, Any, Any]  # position of the argument that is passed in it, C type, how FlyDSL fills it or None


@contextmanager
def _known() -> Iterator[None]:
    try:
        yield
    except (AttributeError, TypeError) as error:
        raise unknown() from error


def unknown() -> TargetError:
    return TargetError(
        f"flydsl {version('flydsl')} keeps its launches another way than this flycomm knows; install the version that "
        "flycomm asks for"
    )


def launcher(handle: Any) -> tuple[Sequence[Slot], int | None]:
    """The slots of a handle's launches, and the address of its launcher; None if only the handle may call that."""
    with _known():
        slots = list(handle._call_spec or handle._call_state._spec)
        if handle._keepalive._ktrace_traced:  # in-kernel tracing: the handle locks a buffer that it passes
            return slots, None
        entry = ctypes.cast(handle._keepalive._get_func_exe(), ctypes.c_void_p).value
    if not entry or not slots or any(len(slot) != 3 for slot in slots):
        raise unknown()
    return slots, entry


def artifact_of(handle: Any) -> Any:
    """What a handle's code can be made again from, in another process too: it pickles."""
    with _known():
        return handle._keepalive


def last_artifact(function: Any) -> Any:
    """What a ``@flyc.jit`` function was last compiled to, in any way."""
    with _known():
        return function._last_compiled[1]


def copy_of(artifact: Any) -> Any:
    """The same code again, not loaded yet: an artifact loads its module once, onto one device."""
    with _known():
        return pickle.loads(pickle.dumps(artifact))


def handle_of(artifact: Any, function: Any, arguments: tuple[Any, ...]) -> Any:
    """The launch handle that ``flyc.compile(function, *arguments)`` would give, for an artifact that it once gave."""
    with _known():
        function._ensure_sig()
        bound = function._sig.bind(*arguments)
        function._backend_target = get_backend().target
        function._resolve_arguments(bound.arguments)
        function._mem_cache["kept"] = artifact
        return function._make_compiled_function("kept", bound, None)


def cache(room: str) -> Any:
    """FlyDSL's disk cache for a folder of its own: ``get(key)``, ``compile_lock(key)``; None if it is off.

    Off, too, where compiling does more than to give a handle, or depends on more than sources and a backend.
    """
    with _known():
        runtime, debug = flydsl_env.runtime, flydsl_env.debug
        if not runtime.cache_dir or not runtime.enable_cache or runtime.run_only or flydsl_env.compile.compile_only:
            return None
        if (
            debug.dump_ir
            or debug.dump_asm
            or flydsl_env.ktrace.enable
            or jit_function.CompilationContext.get_compile_hints()
        ):
            return None
        return jit_function.JitCacheManager(Path(runtime.cache_dir) / room)


def cache_key(text: str) -> str:
    """A key for :func:`cache`: of ``text``, of FlyDSL with all its tools, and of the backend and what it is told."""
    with _known():
        backend = get_backend()
        told = jit_function._cache_invalidating_env_values(backend.target)
        return jit_function._disk_cache_key(
            hashlib.sha256(f"{backend.target} {backend.hash()} {told} {text}".encode()).hexdigest()
        )
