# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled ahead as AMD code objects, with a manifest that says how to launch each. Needs no GPU.

For a chip of NVIDIA's they are PTX. ``FLYCOMM_AOT_DIR`` names a folder that was written here: kernels load from it.
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import json
import multiprocessing
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from flydsl.compiler.diagnostics import DSLCompileError

from flycomm import targets
from flycomm.compile import _elf
from flycomm.compile._lowered import Launch, Lowered, lower
from flycomm.errors import CommError, UsageError

ARCHES = tuple(targets.CHIPS)
PTX_ARCHES = ("sm_90",)  # not code objects: the driver's own compiler makes the rest of the way
MANIFEST = "manifest.json"
_FOR_A_PROCESS = 16  # kernels that take as long as a process takes to start
_AT_ONCE = 4  # that a process is given


class Specialization(Protocol):
    """What :data:`flycomm.kernels.SHIPPED` holds: a kernel with everything fixed that it is compiled for."""

    @property
    def name(self) -> str: ...

    def launcher(self) -> Any:
        """The ``@flyc.jit`` function that launches the kernel."""

    def placeholders(self) -> Sequence[Any]:
        """Arguments of the launcher that stand in for real ones."""


@dataclass(frozen=True)
class Failure:
    """A kernel that did not compile, and FlyDSL's reason."""

    name: str
    arch: str
    reason: str


_Result = list[dict[str, Any]] | Failure  # entries of the manifest, or why there are none


@dataclass
class Report:
    """``kernels``: the manifest's entries, one a (specialization, arch, kernel). ``failures``: what has none."""

    kernels: list[dict[str, Any]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def shipped(pattern: str = "*") -> list[Specialization]:
    """The kernels of this package whose name matches the shell pattern. Raises :class:`UsageError` when none does."""
    from flycomm.kernels import SHIPPED

    chosen: list[Specialization] = [spec for spec in SHIPPED if fnmatch.fnmatchcase(spec.name, pattern)]
    if not chosen:
        names = ", ".join(spec.name for spec in SHIPPED)
        raise UsageError(f"no kernel is named like {pattern!r}; the names are {names}")
    return chosen


def compile_code_objects(
    specializations: Sequence[Specialization],
    arches: Sequence[str],
    out: Path,
    on_compiled: Callable[[str, str], None] = lambda name, arch: None,
    jobs: int = 1,
) -> Report:
    """Write ``<name>.<arch>.co`` for every specialization and arch to the folder ``out``, and ``manifest.json``.

    Of :data:`PTX_ARCHES` it is ``.ptx``. Beside a kernel of flycomm's lies ``.kernel``, from which a process loads it.

    ``on_compiled(name, arch)`` is called after each, in the order of the manifest. What FlyDSL cannot compile is
    collected in the report and left out of the manifest. Kernels of :func:`shipped` are spread over up to ``jobs``
    processes, others are compiled in this one; the main module has to be importable, as for ``multiprocessing``.
    Raises :class:`UsageError` for an ``arch`` that is in neither, :class:`TargetError` without a linker.
    """
    known = ARCHES + PTX_ARCHES
    for arch in arches or ("",):
        if arch not in known:
            raise UsageError(f"arch {arch!r} is not one that the kernels are made for; pass {' or '.join(known)}")
    for arch in arches:
        with targets.compiling_for(_target(arch), arch):
            pass  # a missing linker is found here, before anything is started
    out.mkdir(parents=True, exist_ok=True)
    report = Report()
    tasks = [(spec, arch) for arch in arches for spec in specializations]
    with _compiled(tasks, out, min(jobs, len(tasks) // _FOR_A_PROCESS)) as results:
        for (spec, arch), found in zip(tasks, results, strict=True):
            if isinstance(found, Failure):
                report.failures.append(found)
            else:
                report.kernels += found
            on_compiled(spec.name, arch)
    (out / MANIFEST).write_text(json.dumps({"kernels": report.kernels}, indent=1) + "\n")
    return report


@contextmanager
def _compiled(tasks: Sequence[tuple[Specialization, str]], out: Path, jobs: int) -> Iterator[Iterator[_Result]]:
    """What :func:`_compile` returns for each task, in order."""
    from flycomm.kernels import SHIPPED

    if jobs < 2 or not {spec for spec, _ in tasks} <= set(SHIPPED):  # a kernel that has no name cannot be sent
        yield (_compile(spec, arch, out) for spec, arch in tasks)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        names, chips = zip(*((spec.name, arch) for spec, arch in tasks), strict=True)
        yield pool.map(_compile_shipped, names, chips, itertools.repeat(out), chunksize=_AT_ONCE)


def _compile_shipped(name: str, arch: str, out: Path) -> _Result:
    (spec,) = shipped(glob.escape(name))
    return _compile(spec, arch, out)


def _compile(spec: Specialization, arch: str, out: Path) -> _Result:
    with targets.compiling_for(_target(arch), arch):
        try:
            return _write(spec, arch, out)
        except (DSLCompileError, CommError) as error:
            return Failure(spec.name, arch, str(error).strip().split("\n")[0])


def _target(arch: str) -> str:
    return "cuda" if arch in PTX_ARCHES else "rocm"


def _write(spec: Specialization, arch: str, out: Path) -> list[dict[str, Any]]:
    from flycomm import kernels
    from flycomm.kernels import _ahead

    lowered = lower(spec.launcher(), spec.placeholders())
    entries = []
    for number, (binary, data) in enumerate(lowered.binaries.items()):
        suffix = f".{number}" if number else ""
        file = f"{_file_name(spec.name)}{suffix}.{arch}.{'ptx' if arch in PTX_ARCHES else 'co'}"
        (out / file).write_bytes(data)
        launches = _launches(lowered, binary)
        if arch in PTX_ARCHES:
            entries += [_common(spec.name, kernel, file, arch, launch) for kernel, launch in launches.items()]
        else:
            entries += _entries(spec.name, arch, file, _elf.parse(data), launches)
    loads = _ahead.keep(spec, out) if isinstance(spec, kernels.Specialization) else ""
    return [entry | {"loads": loads} for entry in entries]


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name)


def _launches(lowered: Lowered, binary: str) -> dict[str, Launch]:
    return {launch.kernel: launch for launch in lowered.launches if launch.binary == binary}


def _common(name: str, kernel: str, file: str, arch: str, launch: Launch) -> dict[str, Any]:
    """What an entry says of a kernel on any chip."""
    shape = {"grid": list(launch.grid), "block": list(launch.block)}
    return {"name": name, "kernel": kernel, "file": file, "arch": arch} | shape | {"flydsl": version("flydsl")}


def _entries(
    name: str, arch: str, file: str, code: _elf.CodeObject, launches: dict[str, Launch]
) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "kernel": kernel[".name"],
            "file": file,
            "arch": arch,
            "args": arguments(kernel, launches[kernel[".name"]]),
            "grid": list(launches[kernel[".name"]].grid),
            "block": list(launches[kernel[".name"]].block),
            "vgprs": kernel[".vgpr_count"],
            "sgprs": kernel[".sgpr_count"],
            "lds": kernel[".group_segment_fixed_size"],
            "scratch": kernel[".private_segment_fixed_size"],
            "code_bytes": code.symbols[kernel[".name"]].num_bytes,
            "flydsl": version("flydsl"),
        }
        for kernel in code.kernels
    ]


def arguments(kernel: dict[str, Any], launch: Launch) -> list[dict[str, Any]]:
    """In the order of the kernel's own argument block; the compiler's hidden arguments have no name and no type."""
    arguments = []
    for index, found in enumerate(kernel.get(".args", ())):
        known = index < len(launch.names)
        arguments.append(
            {
                "name": launch.names[index] if known else None,
                "offset": found[".offset"],
                "size": found[".size"],
                "type": launch.types[index] if known else None,
                "value_kind": found[".value_kind"],
            }
        )
    return arguments
