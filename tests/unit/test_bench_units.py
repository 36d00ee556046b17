# SPDX-License-Identifier: Apache-2.0
"""Sizes, lists and cases as a command line has them."""

from __future__ import annotations

import pytest

from flycomm.bench.cli import main
from flycomm.bench.options import parse_cases
from flycomm.bench.problem import Case
from flycomm.bench.units import format_bytes, parse_bytes, parse_list
from flycomm.errors import UsageError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("512", 512), ("512B", 512), ("8KiB", 8192), (" 8 kib ", 8192), ("0.5MiB", 524288), ("1GiB", 1 << 30)],
)
def test_parse_bytes(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "KiB", "8KB", "8K", "-8KiB", "1e3", "8KiBs", "0", "0.3B", "1.5.2KiB"])
def test_what_is_no_size_is_refused_with_its_words(text):
    with pytest.raises(UsageError) as refused:
        parse_bytes(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(2, "2 B"), (1024, "1 KiB"), (1536, "1536 B"), (128 << 10, "128 KiB"), (3 << 20, "3 MiB")]
)
def test_format_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text
    assert parse_bytes(text) == num_bytes


def test_lists_keep_their_order_and_lose_blanks_and_repeats():
    assert parse_list("b, a,,b ,c") == ["b", "a", "c"]
    assert parse_list(" ") == []


def test_cases_are_every_size_with_every_dtype():
    assert parse_cases("8KiB,8192,2KiB", "bf16,f32") == (
        Case(8192, "bf16"),
        Case(2048, "bf16"),
        Case(8192, "f32"),
        Case(2048, "f32"),
    )


@pytest.mark.parametrize(
    ("sizes", "dtypes", "word"), [("6", "f32", "multiple of 4"), ("8", "f64", "'f64'"), ("", "f32", "at least one")]
)
def test_bad_cases_are_refused(sizes, dtypes, word):
    with pytest.raises(UsageError, match=word):
        parse_cases(sizes, dtypes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mode", "graph"], ["mode graph", "target host", "use eager"]),
        (["--bytes", "8kb"], ["'8kb'", "8KiB"]),
        (["--against", "mpi"], ["'mpi'", "gloo"]),
        (["--against", "none,gloo"], ["'none'"]),
        (["--calls", "1"], ["--calls 1", "at least 4"]),
        (["--calls", "0"], ["--calls 0"]),
        (["--repeats", "0"], ["--repeats 0"]),
        (["--world", "0"], ["--world 0"]),
        (["--reduction", "mean"], ["--reduction mean", "avg"]),
        (["--skew-us", "-1"], ["--skew-us -1", "0..100000"]),
        (["--skew-us", "1e9"], ["--skew-us 1e+09"]),
        (["--skew-us", "nan"], ["--skew-us nan"]),
        (["--compare", "no/such/file"], ["no/such/file", "--json"]),
        (["--from", "no/such/file"], ["no/such/file", "--json"]),
    ],
)
def test_bad_options_end_with_one_sentence(options, words, capsys):
    assert main(["all_reduce", "--target", "host", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words), captured.err


def test_a_gather_has_no_reduction(capsys):
    assert main(["all_gather", "--target", "host", "--reduction", "sum"]) == 2
    assert "only moves; leave it out" in capsys.readouterr().err
