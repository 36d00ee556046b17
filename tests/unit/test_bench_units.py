# SPDX-License-Identifier: Apache-2.0
"""Sizes, lists and cases as a command line has them."""

from __future__ import annotations

import argparse

import pytest

from flycomm.bench import cases, options
from flycomm.bench.cli import main
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


def _cases(*words: str) -> tuple[Case, ...]:
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    return cases.parse(parser.parse_args(words))


def test_cases_are_every_size_with_every_dtype():
    assert _cases("all_reduce", "--bytes", "8KiB,8192,2KiB", "--dtype", "bf16,f32") == (
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
        _cases("all_reduce", "--bytes", sizes, "--dtype", dtypes)


def test_rows_have_a_size_in_every_measure():
    norm = _cases("all_reduce_norm", "--rows", "1,4", "--hidden", "8,16", "--dtype", "bf16")
    assert [(case.num_bytes, case.rows, case.hidden) for case in norm] == [
        (16, 1, 8),
        (32, 1, 16),
        (64, 4, 8),
        (128, 4, 16),
    ]
    assert {(case.columns, case.k, case.exchange_mode) for case in norm} == {(None, None, None)}
    (alone,) = _cases("topk", "--rows", "3", "--columns", "100", "--k", "7", "--dtype", "f32")
    assert alone == Case(1200, "f32", rows=3, columns=100, k=7)
    (spread,) = _cases("topk_exchange", "--rows", "3", "--columns", "100", "--k", "7", "--exchange-mode", "owner")
    assert spread == Case(600, "bf16", rows=3, columns=100, k=7, exchange_mode="owner")
    (how,) = _cases("topk_exchange", "--rows", "3", "--columns", "100", "--k", "7", "--algo", "radix")
    assert (how.exchange_mode, how.algo) == ("all", "radix")


def test_what_is_measured_without_a_word_of_sizes():
    norm = _cases("all_reduce_norm")
    assert {case.rows for case in norm} == {1, 4, 16}
    assert {case.hidden for case in norm} == {4096, 6144, 7168}
    assert {case.exchange_mode for case in _cases("topk_exchange")} == {"all"}
    assert {case.k for case in _cases("topk")} == {2048}


@pytest.mark.parametrize(
    "words",
    [
        ("all_gather", "--bytes", "2KiB,1536", "--dtype", "f32,bf16"),
        ("all_reduce_norm", "--rows", "1,4", "--hidden", "64"),
        ("topk", "--rows", "2", "--columns", "64,65", "--k", "1,2"),
        ("topk_exchange", "--rows", "2", "--columns", "64", "--k", "3", "--exchange-mode", "shard", "--algo", "push"),
        ("topk_exchange", "--rows", "2", "--columns", "64", "--k", "3", "--given", "candidates"),
    ],
)
def test_the_words_of_cases_give_them_again(words):
    found = _cases(*words)
    again = [part for name, value in cases.words(found).items() for part in (f"--{name}", value)]
    assert _cases(words[0], *again) == found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["all_reduce", "--rows", "4"], ["--rows 4 means nothing to all_reduce", "--bytes"]),
        (["topk", "--bytes", "2KiB"], ["--bytes 2KiB means nothing to topk", "--rows, --columns, --k"]),
        (["topk", "--exchange-mode", "all"], ["--exchange-mode all means nothing to topk"]),
        (["topk", "--given", "candidates"], ["--given candidates means nothing to topk"]),
        (["all_reduce_norm", "--k", "4"], ["--k 4 means nothing to all_reduce_norm", "--hidden"]),
        (["all_reduce_norm", "--rows", "0"], ["--rows 0", "at least 1"]),
        (["all_reduce_norm", "--rows", "1,-4"], ["--rows -4"]),
        (["topk", "--columns", "8KiB"], ["--columns 8KiB is not a whole number"]),
        (["topk_exchange", "--columns", "8", "--k", "9"], ["k=9 is over the 8 columns"]),
        (["topk", "--k", ","], ["at least one of each"]),
        (["topk", "--floors"], ["--floors are of messages", "topk"]),
        (["topk", "--reduction", "max"], ["--reduction max means nothing to topk"]),
    ],
)
def test_bad_sizes_of_rows_end_with_one_sentence(options, words, capsys):
    assert main([*options, "--target", "host"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words), captured.err


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
    assert "means nothing to all_gather; leave it out" in capsys.readouterr().err
