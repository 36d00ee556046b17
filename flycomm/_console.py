# SPDX-License-Identifier: Apache-2.0
"""Tables and progress of the commands: rich on a terminal that has it, plain columns elsewhere."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


def write(text: str = "") -> None:
    """A line on standard output."""
    sys.stdout.write(f"{text}\n")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table to standard output."""
    if not (sys.stdout.isatty() and _has_rich()):
        write(plain_table(title, columns, rows))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(title=escape(title), title_justify="left")
    for column in columns:
        drawn.add_column(escape(column), overflow="fold")
    for row in rows:
        drawn.add_row(*map(escape, row))
    Console().print(drawn)


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as text: a title, a line of column names, a line a row."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    lines = [[*columns], ["-" * width for width in widths], *map(list, rows)]
    body = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([title, *(f"  {line}" for line in body), ""])


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Gives a function to call after each of ``total`` steps with what was done; shows nothing off a terminal."""
    if not (sys.stderr.isatty() and _has_rich()):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, advance=1, description=done)


def _has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None
