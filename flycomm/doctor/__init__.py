# SPDX-License-Identifier: Apache-2.0
"""``python -m flycomm doctor``: what flycomm finds on this machine, and what is missing for each target.

``sections`` looks and gives plain data, ``topology`` asks the drivers' tools, ``show`` prints, and ``archive`` packs
all of it into one file for a bug report.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from flycomm import _console
from flycomm.doctor.archive import write
from flycomm.doctor.sections import collect
from flycomm.doctor.show import show


def main(as_json: bool, archive: Path | None = None, add: Sequence[Path] = (), kernels: str | None = None) -> int:
    """Print the report; 0 if at least one target can run kernels here, else 1.

    ``archive``: a ``.tar.gz`` to write it to, with the files and folders ``add`` and the code objects of the kernels
    whose name matches ``kernels`` (default: those for as many ranks as there are GPUs).
    """
    report = collect()
    if as_json:
        _console.write(json.dumps(report, indent=1))
    else:
        show(report)
    if archive is not None:
        problems = write(archive, report, add, kernels)
        if not as_json:
            for problem in problems:
                _console.write(f"not in the archive: {problem}")
            _console.write(f"written: {archive}")
    return 0 if any(target["ok"] for target in report["targets"]) else 1


__all__ = ["collect", "main", "show"]
