# SPDX-License-Identifier: Apache-2.0
"""The pages: links lead somewhere, and tables of times have the numbers of the result files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flycomm.bench import rows
from flycomm.bench.units import parse_bytes

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
Row = dict[str, Any]


def anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    heads = [re.sub(r"[^\w\- ]", "", head.lower()) for head in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {head.strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def results(name: str) -> list[Row]:
    return rows.load(ROOT / "benchmarks" / "results" / f"h200x2-{name}.jsonl")


def table(page: str, head: str) -> Iterator[tuple[str, str, str]]:
    """Row, column and text of every cell of the first table whose header begins with ``head``."""
    lines = (ROOT / page).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {head} |"))
    columns = [one.strip() for one in lines[start].strip("|").split("|")]
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return
        label, *cells = (one.strip() for one in line.strip("|").split("|"))
        yield from ((label, column, cell) for column, cell in zip(columns[1:], cells, strict=True) if cell)


def same(shown: str, value: float) -> bool:
    digits = len(shown.partition(".")[2])
    return abs(float(shown) - value) <= 0.5001 * 10**-digits


def test_all_reduce():
    found = [one for one in results("all_reduce") if one["replay_on"] == "own" and one["mode"] == "graph"]
    names = {
        "NCCL": "nccl",
        "NCCL, window": "nccl_window",
        "torch best": "torch",
        "FlashInfer": "flashinfer",
        "vLLM": "vllm",
    }
    for label, column, cell in table("docs/facts.md", "bf16"):
        here = [one for one in found if one["bytes"] == parse_bytes(label.replace(" ", ""))]
        if column == "floor":
            value = next(one["us"] for one in here if (one["what"], one["protocol"]) == ("floor", "one_shot"))
        elif column == "flycomm":
            value = next(one["us"] for one in here if one["what"] != "floor")
        elif column in ("NCCL", "NCCL, window"):
            value = next(one["baseline_us"] for one in here if one["baseline"] == names[column])
        else:
            value = min(one["baseline_us"] for one in here if (one["baseline"] or "").startswith(names[column]))
        assert same(cell, value), (label, column, cell, value)


@pytest.mark.parametrize(("column", "name"), [("all-gather", "all_gather"), ("reduce-scatter", "reduce_scatter")])
def test_gathers_and_scatters(column, name):
    found = [one for one in results(name) if one["what"] != "floor" and one["commit"] == "10d34ca"]
    for label, other, cell in table("docs/facts.md", "bytes | all-gather"):
        if other == column:
            size = parse_bytes(label.replace(" ", ""))
            here = next(one for one in found if one["bytes"] == size)
            ours, nccl = cell.rstrip(")").split(" (")
            assert same(ours, here["us"]), (label, cell)
            assert same(nccl, here["baseline_us"]), (label, cell)


def with_ratio(cell: str, bracket: str, us: float, ratio: float | None) -> bool:
    shown, _, rest = cell.partition(" (")
    return same(shown, us) and (not rest or same(rest.rstrip(bracket), ratio))


def test_fused_norms():
    found = [one for one in results("all_reduce_norm") if one["what"] == "all_reduce_norm"]
    alone = {one["bytes"]: one["us"] for one in results("all_reduce_norm") if one["what"] == "all_reduce"}
    names = {"FlashInfer, fused": "flashinfer_fused", "NCCL, then torch.compile": "nccl_compiled"}
    names["NCCL, add, `F.rms_norm`"] = "nccl_separate"
    for label, column, cell in table("docs/facts.md", "rows × hidden"):
        count, hidden = map(int, column.split(" × "))
        here = [one for one in found if (one["rows"], one["hidden"]) == (count, hidden)]
        ours = next(one["us"] for one in here if "--table" in one["command"])
        if label in names:
            value = next(one["baseline_us"] for one in here if one["baseline"] == names[label])
        else:
            value = ours if label == "flycomm" else alone[2 * count * hidden]
        assert with_ratio(cell, ")", value, value / ours), (label, column, cell, value)


def test_mono_ffn():
    found = [one for one in results("mono_ffn") if (one["world"], one["intermediate"]) == (2, 1024)]
    for label, column, cell in table("docs/mono_kernels.md", "hidden 6144, intermediate 1024, rows"):
        baseline = "separate_flycomm" if "flycomm's" in label else "separate_nccl"
        here = next(one for one in found if (one["rows"], one["baseline"]) == (int(column), baseline))
        value = here["us"] if label == "one launch" else here["baseline_us"]
        assert with_ratio(cell, "×)", value, here["ratio"]), (label, column, cell, value)


def test_indexer():
    columns = {"alone": "replicated", "alone, scores only": "replicated_scores", "shared, no exchange": "no_exchange"}
    columns["shared by NCCL and `torch.topk`"] = "cp_nccl_torch"
    for label, column, cell in table("docs/indexer.md", "kind, requests × query rows, context"):
        kind, steps, context = label.split(", ")
        requests = [int(one.split(" × ")[0]) for one in steps.split(" and ")]
        shown = cell.split(", ") if len(requests) > 1 else [cell.partition(":")[0]]
        for count, one in zip(requests, shown, strict=True):
            key = kind.lower().replace("-", "_"), parse_bytes(context.replace(" ", "") + "B"), count
            here = [row for row in results("indexer") if (row["kind"], row["context"], row["requests"]) == key]
            found = next(row for row in here if row["baseline"] == columns.get(column, "replicated"))
            value = found["us"] if column == "shared" else found["baseline_us"]
            assert with_ratio(one, ")", value, found["ratio"]), (label, column, cell, value)


def test_the_first_page():
    def of(name: str, baseline: str, fits: Callable[[Row], bool]) -> tuple[float, float]:
        row = next(one for one in results(name) if one["baseline"] == baseline and fits(one))
        return row["us"], row["baseline_us"]

    shown = [re.findall(r"\d+\.\d|\d\d+", ours + " " + other) for _, ours, other in _paired("README.md")]

    def one_row(row: Row) -> bool:
        return (row["rows"], row["hidden"]) == (1, 6144)

    def step(row: Row) -> bool:
        return (row["context"], row["requests"]) == (1 << 20, 4)

    expected = [
        (*of("all_reduce_norm", "nccl_compiled", one_row), of("all_reduce_norm", "flashinfer_fused", one_row)[1]),
        (*of("mono_ffn", "separate_nccl", one_row), of("mono_ffn", "separate_flycomm", one_row)[1]),
        of("topk_exchange", "nccl_gather_topk", lambda row: (row["rows"], row["k"]) == (16, 16)),
        of("indexer", "replicated", lambda row: row["kind"] == "block_max" and step(row)),
        of("indexer", "replicated", lambda row: row["kind"] == "dsa" and step(row)),
    ]
    for numbers, values in zip(shown, expected, strict=True):
        assert all(same(*pair) for pair in zip(numbers, values, strict=True)), (numbers, values)


def _paired(page: str) -> Iterator[tuple[str, str, str]]:
    cells = list(table(page, "on two H200s, graph replay"))
    for (label, _, ours), (_, _, other) in zip(cells[::2], cells[1::2], strict=True):
        yield label, ours, other
