# SPDX-License-Identifier: Apache-2.0
"""Tables of the commands."""

from __future__ import annotations

import sys

import pytest

from flycomm import _console


def test_plain_table():
    shown = _console.plain_table("Title", ("a", "long"), [("first", "x"), ("", "yz")])
    assert shown == "Title\n  a      long\n  -----  ----\n  first  x\n         yz\n"


def test_a_table_without_rows_has_its_head():
    assert _console.plain_table("T", ("one", "two"), []) == "T\n  one  two\n  ---  ---\n"


def test_rows_of_another_length_are_refused():
    with pytest.raises(ValueError, match="zip"):
        _console.plain_table("T", ("one", "two"), [("1",)])


def test_rich_shows_brackets_as_they_are(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _console.table("Title [a]", ("name",), [("[bold]x[/bold]",)])
    shown = capsys.readouterr().out
    assert "Title [a]" in shown
    assert "[bold]x[/bold]" in shown


def test_progress_off_a_terminal_is_silent(capsys: pytest.CaptureFixture[str]):
    with _console.progress(2) as advance:
        advance("one")
        advance("two")
    assert capsys.readouterr() == ("", "")
