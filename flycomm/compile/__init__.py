# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled ahead as AMD code objects, with a manifest that says how to launch each. Needs no GPU."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from flydsl.compiler.diagnostics import DSLCompileError

from flycomm import targets
from flycomm.compile import _elf
from flycomm.compile._lowered import Launch, Lowered, lower
from flycomm.errors import CommError, UsageError

ARCHES = ("gfx942", "gfx950")
MANIFEST = "manifest.json"


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
) -> Report:
    """Write ``<name>.<arch>.co`` for every specialization and arch to the folder ``out``, and ``manifest.json``.

    ``on_compiled(name, arch)`` is called after each. What FlyDSL cannot compile is collected in the report and left
    out of the manifest. Raises :class:`UsageError` for an ``arch`` that is not in :data:`ARCHES`,
    :class:`TargetError` without a linker.
    """
    for arch in arches or ("",):
        if arch not in ARCHES:
            raise UsageError(f"arch {arch!r} is not one that the kernels are made for; pass {' or '.join(ARCHES)}")
    out.mkdir(parents=True, exist_ok=True)
    report = Report()
    for arch in arches:
        with targets.compiling_for("rocm", arch):
            for spec in specializations:
                try:
                    report.kernels += _write(spec, arch, out)
                except (DSLCompileError, CommError) as error:
                    report.failures.append(Failure(spec.name, arch, str(error).strip().split("\n")[0]))
                on_compiled(spec.name, arch)
    (out / MANIFEST).write_text(json.dumps({"kernels": report.kernels}, indent=1) + "\n")
    return report


def _write(spec: Specialization, arch: str, out: Path) -> list[dict[str, Any]]:
    lowered = lower(spec.launcher(), spec.placeholders())
    entries = []
    for number, (binary, data) in enumerate(lowered.binaries.items()):
        suffix = f".{number}" if number else ""
        file = f"{_file_name(spec.name)}{suffix}.{arch}.co"
        (out / file).write_bytes(data)
        entries += _entries(spec.name, arch, file, _elf.parse(data), _launches(lowered, binary))
    return entries


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name)


def _launches(lowered: Lowered, binary: str) -> dict[str, Launch]:
    return {launch.kernel: launch for launch in lowered.launches if launch.binary == binary}


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
