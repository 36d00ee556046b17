# SPDX-License-Identifier: Apache-2.0
"""Sizes: the options that give them, and the cases that they come to."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from flycomm.bench.problem import Case
from flycomm.bench.reference import DTYPES
from flycomm.bench.subjects import SUBJECTS
from flycomm.bench.subjects.index_cache import FORMATS, KINDS, Shape
from flycomm.bench.units import format_bytes, parse_bytes, parse_counts, parse_list
from flycomm.errors import UsageError
from flycomm.kernels.topk_exchange import MODES, SOURCES
from flycomm.topk.choice import ALGOS

_WORDS = ("exchange-mode", "algo", "given", "grid")  # not numbers, and one of each
_OF_STEPS = ("context", "requests", "query-rows", "heads", "k")  # numbers of an indexer
_NAMES = ("bytes", "rows", "hidden", "intermediate", "projection", "columns", *_OF_STEPS, "kind", "format", *_WORDS)


_DTYPE = "bf16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for each of what a size may be made of; defaults depend on what is measured."""
    add, of_norm = parser.add_argument, SUBJECTS["all_reduce_norm"].options
    of_bytes, of_topk = SUBJECTS["all_reduce"].options["bytes"], SUBJECTS["topk"].options
    of_experts, of_steps = SUBJECTS["moe_finalize_norm"].options["k"], SUBJECTS["indexer"].options
    add("--bytes", metavar="A,B", help=f"of a rank's message, or shard, of a collective (default {of_bytes})")
    add("--rows", metavar="A,B", help=f"default {of_norm['rows']}; of a top-k {of_topk['rows']}")
    add("--hidden", metavar="A,B", help=f"all_reduce_norm: elements of a row (default {of_norm['hidden']})")
    add("--intermediate", metavar="A,B", help="mono_ffn: of the feed-forward layer, on a rank (default 1024)")
    add("--projection", metavar="A,B", help="mono_ffn: columns of what follows, on a rank (default 2048)")
    add("--grid", metavar="BxT", help="mono_ffn: blocks and threads a block, as in 128x256, or 128x256/dot")
    add("--columns", metavar="A,B", help=f"of a top-k: scores of a row, on a rank (default {of_topk['columns']})")
    selected = f"of a top-k: how many of a row are selected (default {of_topk['k']})"
    experts = f"moe_finalize_norm: experts of a row (default {of_experts})"
    add("--k", metavar="A,B", help=f"{selected}; {experts}; indexer: keys of a row (default: the kind's)")
    add("--kind", metavar="A,B", help=f"indexer: any of {', '.join(KINDS)} (default {of_steps['kind']})")
    add("--context", metavar="A,B", help=f"indexer: tokens of a request (default {of_steps['context']})")
    add("--requests", metavar="A,B", help=f"indexer: requests of a step (default {of_steps['requests']})")
    add("--query-rows", metavar="A,B", help=f"indexer: query rows of a request (default {of_steps['query-rows']})")
    add("--format", metavar="A,B", help=f"indexer: of the cache, {', '.join(FORMATS)} (default {of_steps['format']})")
    add("--heads", metavar="A,B", help="indexer: index heads (default: the kind's)")
    add("--exchange-mode", choices=MODES, help="topk_exchange: every row to all (default), to its owner, or by shard")
    add("--algo", choices=ALGOS, help="topk_exchange: how (default: as its call chooses)")
    add("--given", choices=SOURCES, help="topk_exchange: what a rank begins with, its scores (default) or its k best")
    add("--dtype", metavar="A,B", help=f"any of {', '.join(DTYPES)} (default {_DTYPE}); an indexer has a --format")


def parse(args: argparse.Namespace) -> tuple[Case, ...]:
    """Every size with every dtype, dtype by dtype. Raises :class:`UsageError` for what is not a case."""
    return of(args.what, {name: getattr(args, name.replace("-", "_")) for name in _NAMES}, args.dtype)


def of(what: str, given: Mapping[str, str | None], dtypes: str | None = None) -> tuple[Case, ...]:
    """:func:`parse` of options by name, ``given`` as typed; what is not in it, or None, is as usual for ``what``."""
    defaults = SUBJECTS[what].options
    for name, value in given.items():
        if value is not None and name not in defaults:
            sizes = ", ".join(f"--{one}" for one in defaults)
            raise UsageError(f"--{name} {value} means nothing to {what}, which is sized by {sizes}; leave it out")
    chosen = {name: default if given.get(name) is None else given[name] for name, default in defaults.items()}
    cases = _of_steps(chosen, what, dtypes) if "format" in chosen else []
    for dtype in [] if "format" in chosen else parse_list(dtypes or _DTYPE):
        if dtype not in DTYPES:
            raise UsageError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}; use these")
        cases += _of_bytes(str(chosen["bytes"]), dtype) if "bytes" in chosen else _of_rows(chosen, dtype)
    if not cases:
        raise UsageError("no sizes or no dtypes were given; give at least one of each")
    return tuple(dict.fromkeys(cases))


def _of_bytes(sizes: str, dtype: str) -> list[Case]:
    cases = []
    for size in parse_list(sizes):
        num_bytes = parse_bytes(size)
        if num_bytes % DTYPES[dtype].itemsize:
            raise UsageError(
                f"{num_bytes} bytes are not a whole number of {dtype} elements; give a multiple of "
                f"{DTYPES[dtype].itemsize} bytes"
            )
        cases.append(Case(num_bytes, dtype))
    return cases


def _of_rows(chosen: dict[str, Any], dtype: str) -> list[Case]:
    names = [name for name in chosen if name not in _WORDS]
    said = {name.replace("-", "_"): chosen[name] for name in _WORDS if name in chosen}
    cases = []
    for values in product(*(parse_counts(chosen[name], name) for name in names)):
        shape = dict(zip(names, values, strict=True))
        width = shape.get("hidden") or shape["columns"]
        if shape.get("k", 0) > width:
            raise UsageError(f"k={shape['k']} is over the {width} columns of a row; give at least as many columns")
        num_bytes = shape["rows"] * width * DTYPES[dtype].itemsize
        fields: dict[str, Any] = {**shape, **said}
        cases.append(Case(num_bytes, dtype, **fields))
    return cases


def _of_steps(chosen: dict[str, Any], what: str, dtypes: str | None) -> list[Case]:
    if dtypes is not None:
        raise UsageError(f"--dtype {dtypes} means nothing to {what}, whose cache has a --format; leave it out")
    formats, kinds = parse_list(chosen["format"]), parse_list(chosen["kind"])
    counts = [[None] if chosen[name] is None else parse_counts(chosen[name], name) for name in _OF_STEPS]
    names = [name.replace("-", "_") for name in _OF_STEPS]
    cases = []
    for format, kind, values in product(formats, kinds, product(*counts)):
        fields: dict[str, Any] = dict(zip(names, values, strict=True))
        case = Case(0, format, kind=kind, **fields)
        cases.append(replace(case, num_bytes=Shape.of(case).share_bytes(1)))
    return cases


def words(cases: tuple[Case, ...]) -> dict[str, Any]:
    """The options, name to value, that give these cases again."""
    found: dict[str, list[str]] = {}
    for case in cases:
        for name, value in case.fields().items():
            if value is not None and not (name == "bytes" and (case.rows is not None or case.kind is not None)):
                word = format_bytes(value).replace(" ", "") if name == "bytes" else str(value)
                option = "format" if name == "dtype" and case.kind is not None else name.replace("_", "-")
                found.setdefault(option, []).append(word)
    return {name: ",".join(dict.fromkeys(values)) for name, values in found.items()}
