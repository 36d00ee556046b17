# SPDX-License-Identifier: Apache-2.0
"""``python -m flycomm trace``: a timeline figure from a file that ``comm.trace()`` wrote."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flycomm.errors import CommError
from flycomm.trace import plot


def main(arguments: Sequence[str] | None = None) -> int:
    """The whole command; returns the exit code: 0, or 2 where there is nothing to draw, or nothing to draw with."""
    parser = argparse.ArgumentParser(
        prog="python -m flycomm trace", description="Draw a timeline from a file that comm.trace() wrote."
    )
    parser.add_argument("file", type=Path, help="the trace; ui.perfetto.dev shows all of it")
    parser.add_argument("--out", type=Path, metavar="PNG", help="figure to write (default: beside the file)")
    parser.add_argument("--channel", default="", metavar="WORDS", help="only channels with these words in their name")
    parser.add_argument("--blocks", type=int, default=16, metavar="N", help="only the first N blocks (default 16)")
    args = parser.parse_args(arguments)
    try:
        plot.save(plot.load(args.file), args.out or args.file.with_suffix(".png"), args.channel, args.blocks)
        return 0
    except CommError as error:
        sys.stderr.write(f"flycomm trace: {error}\n")
        return 2
