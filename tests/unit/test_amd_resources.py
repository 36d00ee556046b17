# SPDX-License-Identifier: Apache-2.0
"""The table of docs/amd.md, from a manifest."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "amd_resources.py"))


def _kernel(name: str, vgprs: int, lds: int) -> dict[str, object]:
    return {"name": name, "arch": "gfx942", "vgprs": vgprs, "sgprs": 9, "lds": lds, "scratch": 0, "code_bytes": 100}


def test_the_most_of_every_kernel(tmp_path: Path):
    kernels = [
        _kernel("all_reduce_flags_bf16_w2_8x256", 10, 4),
        _kernel("all_reduce_flags_f32_w8_16x256", 7, 8),
        _kernel("barrier_w2_1x64", 3, 0),
        {"name": "barrier_w2_1x64", "arch": "sm_90"},  # PTX says nothing of resources
    ]
    (tmp_path / "manifest.json").write_text(json.dumps({"kernels": kernels}))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{TOOL['BEGIN']}old\n{TOOL['END']}after\n")
    for _ in range(2):
        TOOL["main"](tmp_path, page)
        head, _, rest = page.read_text().partition("| all_reduce")
        assert head.startswith(f"before\n{TOOL['BEGIN']}| kernel | chip |")
        assert f"| all_reduce{rest}" == (
            "| all_reduce_flags | gfx942 | 2 | 10 | 9 | 8 | 0 | 100 |\n"
            f"| barrier | gfx942 | 1 | 3 | 9 | 0 | 0 | 100 |\n{TOOL['END']}after\n"
        )


def test_the_page_has_a_table():
    page = (ROOT / "docs" / "amd.md").read_text()
    table = page.partition(TOOL["BEGIN"])[2].partition(TOOL["END"])[0]
    assert table.count("| all_reduce_flags | gfx9") == 2
