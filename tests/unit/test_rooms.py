# SPDX-License-Identifier: Apache-2.0
"""Data flows down through the rooms of the house, and a room imports only from rooms above it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "flycomm"
DOOR = "__init__"  # what `import flycomm` gives: the public names

ROOMS = (
    "errors",
    "env",
    "dtypes",
    "epoch",
    "geometry",
    "channel",
    "tables",
    "layout",
    "_shim",
    "targets",
    "world",
    "validate",
    "memory",
    "views",
    "primitives",
    "kernels",
    "indexer",
    "dispatch",
    "channels",
    "ops",
    "fallback",
    "residency",
    "session",
    "topk",
    "collectives",
    "fused",
    "signals",
    "symmetric",
    "trace",
    "communicator",
    "start",
    DOOR,
    "mono",
    "_console",
    "bench",
    "tune",
    "compile",
    "litmus",
    "doctor",
    "__main__",
)


def room_of(module: str) -> str:
    """``flycomm.targets.host`` is in the room ``targets``; ``flycomm`` itself is the door."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else DOOR


def position(room: str) -> int:
    return ROOMS.index(room) if room in ROOMS else len(ROOMS)


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every module that ``module`` imports, at the top or in a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                package = package[: len(package) - node.level + 1]
                base = ".".join([*package, base] if base else package)
            if base == "flycomm":  # a room, or a public name that the door gives; the version is nobody's
                names = [alias.name for alias in node.names if alias.name != "__version__"]
                yield from ((node.lineno, f"flycomm.{name}" if name in ROOMS else base) for name in names)
            else:
                yield node.lineno, base


def upward(source: str, module: str, is_package: bool = False) -> list[str]:
    """The imports of ``module`` that go against the order, as sentences."""
    here = room_of(module)
    wrong = []
    for line, imported in imports_of(source, module, is_package):
        if imported.split(".")[0] == "flycomm":
            there = room_of(imported)
            if position(there) > position(here):
                wrong.append(f"{module}:{line} imports {imported}, but {there} stands below {here}")
    return wrong


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_file_has_a_room():
    homeless = {room for room in (room_of(module_of(path)) for path in FILES) if room not in ROOMS}
    assert not homeless, f"give {', '.join(sorted(homeless))} a place in ROOMS"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_go_up(path: Path):
    assert upward(path.read_text(), module_of(path), path.name == "__init__.py") == []


@pytest.mark.parametrize(
    "source",
    [
        "from flycomm import world",
        "import flycomm.world",
        "from flycomm.world import World",
        "def late():\n    from .. import world",
        "from ..world import World",
        "from flycomm import init",
    ],
)
def test_a_wrong_import_is_found(source: str):
    assert len(upward(source, "flycomm.targets.host")) == 1


@pytest.mark.parametrize(
    "source",
    ["from flycomm import __version__, env, errors", "from . import base", "from .base import Target", "import os"],
)
def test_a_right_import_is_not(source: str):
    assert upward(source, "flycomm.targets.host") == []


@pytest.mark.parametrize("path", sorted((PACKAGE / "primitives").rglob("*.py")), ids=module_of)
def test_primitives_have_no_torch(path: Path):
    found = imports_of(path.read_text(), module_of(path), path.name == "__init__.py")
    assert [name for _, name in found if name.split(".")[0] == "torch"] == []


SHIM = sorted((ROOT / "csrc_shim").glob("*.[chS]"))


@pytest.mark.parametrize("path", SHIM, ids=lambda path: path.name)
def test_the_shim_includes_no_python_torch_or_driver(path: Path):
    included = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)
    foreign = re.compile(r"Python\.h|torch/|ATen/|c10/|cuda|hip/|nccl|rccl", re.IGNORECASE)
    assert [name for name in included if foreign.match(name) and not (path.parent / name).exists()] == []
