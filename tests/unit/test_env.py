# SPDX-License-Identifier: Apache-2.0
"""Environment variables: parsed where they are used, named in one place, refused with a sentence."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from flycomm import env
from flycomm.errors import CommError, UsageError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("variable", env.ALL, ids=lambda variable: variable.name)
@pytest.mark.parametrize("unset", [None, ""])
def test_unset_gives_the_default(variable: env.Variable, unset: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(variable.name, raising=False)
    if unset is not None:
        monkeypatch.setenv(variable.name, unset)
    assert variable.get() == variable.default


@pytest.mark.parametrize(
    ("variable", "raw", "value"),
    [
        (env.TARGET, "CUDA", "cuda"),
        (env.TIMEOUT, "2.5", 2.5),
        (env.TIMEOUT, "0", 0.0),
        (env.DEBUG, "on", True),
        (env.DEBUG, "False", False),
        (env.HOST_WEAK, "1", True),
        (env.HOST_WEAK, "0", False),
        (env.PDL, "0", False),
        (env.HOST_SEED, "7", 7),
        (env.HOST_WARP, "64", 64),
        (env.HOST_THREADS, "3", 3),
        (env.CUDA_SHARING, "FD", "fd"),
        (env.SHIM, "/somewhere/libflycomm_shim.so", "/somewhere/libflycomm_shim.so"),
    ],
)
def test_a_set_variable_is_read_at_use(
    variable: env.Variable, raw: str, value: object, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(variable.name, raw)
    assert variable.get() == value


@pytest.mark.parametrize(
    ("variable", "raw"),
    [
        (env.TARGET, "opencl"),
        (env.TIMEOUT, "soon"),
        (env.DEBUG, "2"),
        (env.CUDA_SHARING, "pidfd"),
        (env.HOST_SEED, "0.5"),
        (env.HOST_WARP, "48"),
        (env.HOST_THREADS, "many"),
    ],
)
def test_nonsense_is_refused_with_name_value_and_meaning(
    variable: env.Variable, raw: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(variable.name, raw)
    with pytest.raises(UsageError) as caught:
        variable.get()
    message = str(caught.value)
    assert variable.name in message
    assert repr(raw) in message
    assert variable.meaning in message
    assert isinstance(caught.value, (CommError, ValueError))


def test_all_names_every_variable_once():
    defined = {value.name for value in vars(env).values() if isinstance(value, env.Variable)}
    listed = [variable.name for variable in env.ALL]
    assert sorted(listed) == sorted(defined)
    assert all(re.fullmatch(r"FLYCOMM_[A-Z_]+", name) for name in listed)


def test_no_other_file_reads_a_variable():
    strays = []
    for path in sorted((ROOT / "flycomm").rglob("*.py")):
        if path.name == "env.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and re.fullmatch(r"FLYCOMM_[A-Z_]+", str(node.value)):
                strays.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.value}")
    for path in sorted((ROOT / "csrc_shim").glob("*.[ch]")):
        strays += [f"{path.name}: {name}" for name in re.findall(r'getenv\("(FLYCOMM_\w+)"\)', path.read_text())]
    assert strays == []
