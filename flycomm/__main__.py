# SPDX-License-Identifier: Apache-2.0
"""``python -m flycomm``: doctor, compile, bench, tune, trace, litmus."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from flycomm import __version__, _console
from flycomm.errors import CommError, UsageError

_OF_THEIR_OWN = ("bench", "tune", "trace", "litmus")  # commands with options of their own, loaded only when asked for


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code of the process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in _OF_THEIR_OWN:
        return importlib.import_module(f"flycomm.{words[0]}.cli").main(words[1:])
    options = _parser().parse_args(words)
    try:
        return _doctor(options) if options.command == "doctor" else _compile(options)
    except CommError as error:
        sys.stderr.write(f"flycomm {options.command}: {error}\n")
    except OSError as error:
        sys.stderr.write(
            f"flycomm {options.command}: {error.filename} cannot be written ({error.strerror}); name another\n"
        )
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flycomm", description="Communication between the GPUs of one node, inside a kernel."
    )
    parser.add_argument("--version", action="version", version=f"flycomm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    doctor = commands.add_parser("doctor", help="what is found on this machine, and what is missing")
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    doctor.add_argument("--archive", type=Path, metavar="FILE.tar.gz", help="write the report and what belongs to it")
    doctor.add_argument(
        "--add", type=Path, nargs="*", default=[], metavar="PATH", help="test and benchmark results, to the archive"
    )
    doctor.add_argument(
        "--kernels", metavar="GLOB", help="whose code objects are in the archive (default: as many ranks as GPUs)"
    )

    compiling = commands.add_parser("compile", help="kernels compiled ahead, and a manifest; needs no GPU")
    compiling.add_argument("--arch", required=True, metavar="A,B", help="chips, for example gfx942,gfx950,sm_90")
    compiling.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write to; made if missing")
    compiling.add_argument("--kernel", default="*", metavar="GLOB", help="only kernels whose name matches")
    compiling.add_argument("--json", action="store_true", help="print the manifest instead of a table")

    commands.add_parser("bench", help="measure a collective against its baselines", add_help=False)
    commands.add_parser(
        "tune", help="measure which protocol and grid is fastest, and use it from then on", add_help=False
    )
    commands.add_parser("trace", help="a timeline figure from a trace", add_help=False)
    commands.add_parser("litmus", help="in which order ranks see each other's stores", add_help=False)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    from flycomm import doctor

    if options.archive is None and (options.add or options.kernels):
        raise UsageError("--add and --kernels say what is in an archive; pass --archive FILE.tar.gz with them")
    return doctor.main(options.json, options.archive, options.add, options.kernels)


def _compile(options: argparse.Namespace) -> int:
    from flycomm import compile as ahead

    specializations = ahead.shipped(options.kernel)
    arches = [arch for arch in options.arch.split(",") if arch]
    with _console.progress(len(specializations) * len(arches)) as advance:
        report = ahead.compile_code_objects(
            specializations,
            arches,
            options.out,
            lambda name, arch: advance(f"{name} {arch}"),
            len(os.sched_getaffinity(0)),
        )
    if options.json:
        _console.write(json.dumps({"kernels": report.kernels}, indent=1))
    else:
        _summary(report.kernels, options.out)
    for failure in report.failures:
        sys.stderr.write(f"flycomm compile: {failure.name} for {failure.arch} failed: {failure.reason}\n")
    return 1 if report.failures else 0


def _summary(kernels: list[dict[str, object]], out: Path) -> None:
    columns = ("name", "arch", "grid", "block", "vgprs", "sgprs", "lds", "scratch", "code_bytes")
    rows = [[_cell(kernel.get(column, "")) for column in columns] for kernel in kernels]
    _console.table(f"{len(kernels)} kernels in {out}", columns, rows)


def _cell(value: object) -> str:
    return "×".join("?" if one is None else str(one) for one in value) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    sys.exit(main())
