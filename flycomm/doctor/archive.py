# SPDX-License-Identifier: Apache-2.0
"""One file to attach to a bug report: what doctor found, what ran, and the code that it ran.

A machine that needs a report has something broken, so what cannot be had is named in ``missing.txt`` and the rest is
packed all the same.
"""

from __future__ import annotations

import json
import os
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flycomm import compile as ahead
from flycomm.errors import CommError, UsageError
from flycomm.kernels._ahead import SUFFIX

FOLDER = "flycomm-report"  # of everything in the archive
_SUFFIXES = (".tar.gz", ".tgz")


def write(path: Path, report: dict[str, Any], add: Sequence[Path], kernels: str | None) -> list[str]:
    """Write the archive, and return what is not in it.

    ``report``: of ``sections.collect``. ``add``: files and folders (test results, litmus and benchmark results).
    ``kernels``: a pattern of names; their code objects for every GPU found, and the manifest. Raises
    :class:`UsageError` for a path that is no archive's.
    """
    if not path.name.endswith(_SUFFIXES):
        raise UsageError(f"archive {path} does not end in {' or '.join(_SUFFIXES)}; name one that does")
    missing = [f"{one}: there is no such file" for one in add if not one.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="flycomm-report-") as made:
        folder = Path(made)
        (folder / "doctor.json").write_text(json.dumps(report, indent=1) + "\n")
        _write_topology(report["topology"], folder)
        missing += _compile(report["targets"], kernels, folder / "kernels")
        if missing:
            (folder / "missing.txt").write_text("\n".join(missing) + "\n")
        with tarfile.open(path, "w:gz") as packed:
            for one in sorted(folder.iterdir()):
                packed.add(one, f"{FOLDER}/{one.name}", filter=_readable)
            for one in add:
                if one.exists():
                    packed.add(one, f"{FOLDER}/{one.resolve().name}")
    return missing


def _readable(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """All but what kernels are loaded from: the code in it is there once more, and nobody should load a stranger's."""
    return None if member.name.endswith(SUFFIX) else member


def _write_topology(found: Any, folder: Path) -> None:
    for one in found if isinstance(found, list) else []:
        name = one["command"].split()[0]
        (folder / f"{name}.txt").write_text(f"{one['output']}{one['problem']}\n")


def _compile(targets: Sequence[dict[str, Any]], kernels: str | None, folder: Path) -> list[str]:
    """The code objects for the GPUs of all usable targets; returns what could not be compiled."""
    devices = [device for one in targets if one["ok"] and one["name"] != "host" for device in one["devices"]]
    arches = sorted({device["arch"] for device in devices})
    if not arches:
        return []
    pattern = f"*_w{max(2, len(devices))}_*" if kernels is None else kernels
    try:
        report = ahead.compile_code_objects(
            ahead.shipped(pattern), arches, folder, lambda name, arch: None, len(os.sched_getaffinity(0))
        )
    except (CommError, OSError) as error:
        return [f"kernels {pattern} for {', '.join(arches)}: {error}"]
    return [f"kernel {failure.name} for {failure.arch}: {failure.reason}" for failure in report.failures]
