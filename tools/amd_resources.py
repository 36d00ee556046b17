# SPDX-License-Identifier: Apache-2.0
"""``amd_resources.py FOLDER PAGE``: the table of resources in docs/amd.md, from a folder of ``flycomm compile``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- resources: begin -->\n", "<!-- resources: end -->\n"
_COLUMNS = ("vgprs", "sgprs", "lds", "scratch", "code_bytes")
_HEAD = """| kernel | chip | specializations | vector registers | scalar registers | LDS | scratch | code |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def table(kernels: Iterable[dict[str, Any]]) -> str:
    """A row a kernel and chip: how many specializations, and the most that one of them takes."""
    most: dict[tuple[str, str], list[int]] = {}
    for kernel in kernels:
        if "vgprs" not in kernel:  # of another vendor's chip
            continue
        row = most.setdefault((_family(kernel["name"]), kernel["arch"]), [0] * (1 + len(_COLUMNS)))
        row[0] += 1
        row[1:] = [max(before, kernel[column]) for before, column in zip(row[1:], _COLUMNS, strict=True)]
    rows = (f"| {name} | {arch} | {' | '.join(map(str, row))} |\n" for (name, arch), row in sorted(most.items()))
    return _HEAD + "".join(rows)


def _family(name: str) -> str:
    """The kernel's own name, without element type, world size and grid."""
    return re.sub(r"(_(f32|f16|bf16))?_w\d+_\d+x\d+$", "", name)


def main(folder: Path, page: Path) -> None:
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    kernels = json.loads((folder / "manifest.json").read_text())["kernels"]
    page.write_text(f"{before}{BEGIN}{table(kernels)}{END}{after}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
