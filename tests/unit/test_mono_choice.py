# SPDX-License-Identifier: Apache-2.0
"""Mono or separate: a table of choices by hand, and what holds for all of them. Needs no device."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flycomm.errors import UsageError
from flycomm.mono.choice import AttentionOutLayout, Chooser, FfnLayout, Rule, Step, checked_classes

LAYOUT = FfnLayout(hidden=6144, inter=1024, out=2048)
CHOOSER = Chooser("llm", "cuda", "sm_90", 2, LAYOUT, (1, 2, 4, 8, 16), (Rule(rows=16),), None)


@pytest.mark.parametrize(
    ("step", "rows_class"),
    [
        (Step(1), 1),
        (Step(2), 2),
        (Step(3), 4),
        (Step(1, drafts=5), 8),  # six rows
        (Step(1, drafts=5, padded=8), 8),
        (Step(1, padded=16), 16),  # padding counts
        (Step(5, drafts=2), 16),
        (Step(6, drafts=2), 0),  # eighteen
        (Step(16), 16),
        (Step(17), 0),
        (Step(1, padded=32), 0),
        (Step(0, padded=4), 4),  # a rank with nothing to do, in a padded graph
        (Step(0), 0),
        (Step(1, prefill=True), 0),
    ],
)
def test_rows_choose_the_class(step: Step, rows_class: int):
    choice = CHOOSER.choose(step)
    assert choice.rows_class == rows_class
    assert choice.why.startswith("mono: " if rows_class else "separate: ")


def test_drafts_and_padding_are_rows():
    assert Step(1, drafts=5).rows == 6
    assert Step(1, drafts=5, padded=8).rows == 8
    assert CHOOSER.choose(Step(1, 5, 8)).why == "mono: 8 rows (1 requests of 6 tokens, padded to 8) by the layer of 8"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rules": (Rule(4),)}, "8 rows are over 4, the cap for model 'llm' on cuda sm_90 with 2 ranks"),
        ({"rules": (Rule(4, model="ll?"), Rule(16))}, "over 4, the cap"),
        ({"rules": (Rule(16, arch="gfx9*"),)}, "over 0, no rule covers model 'llm' on cuda sm_90"),
        ({"rules": (Rule(16, worlds=(4, 8)),)}, "no rule covers"),
        ({"rules": (Rule(0),)}, "over 0, the cap"),
        ({"classes": (1, 2)}, "over 2, the largest mono layer"),
        ({"classes": ()}, "there is no mono layer"),
        ({"pays": 4}, "over 4, what pays by the dispatch table"),
        ({"layout": replace(LAYOUT, dtype="f16")}, "dtype 'f16' is not bf16"),
        ({"layout": replace(LAYOUT, inter=1020)}, "multiples of 8"),
        ({"layout": replace(LAYOUT, out=3)}, "the last of 2"),
        ({"layout": replace(LAYOUT, hidden=0)}, "hidden 0"),
        ({"layout": AttentionOutLayout(6144, 1024, 256, 300)}, "the best 300 of 256 experts"),
        ({"layout": AttentionOutLayout(6144, 1020, 256, 8)}, "of 8 are needed"),
    ],
)
def test_what_keeps_a_step_separate_is_said(changed, words):
    choice = replace(CHOOSER, **changed).choose(Step(8))
    assert choice.rows_class == 0
    assert words in choice.why


def test_a_cap_of_48_needs_layers_for_it():
    wide = replace(CHOOSER, rules=(Rule(48),), classes=(16, 32, 48))
    assert [wide.choose(Step(rows)).rows_class for rows in (1, 17, 48, 49)] == [16, 32, 48, 0]
    assert replace(CHOOSER, rules=(Rule(48),)).choose(Step(17)).rows_class == 0


@pytest.mark.parametrize(
    ("changed", "rows"),
    [
        ({}, (1, 2, 4, 8, 16)),
        ({"rules": (Rule(4),)}, (1, 2, 4)),
        ({"rules": (Rule(6),)}, (1, 2, 4, 6)),
        ({"pays": 3}, (1, 2, 3)),
        ({"pays": 0}, ()),
        ({"classes": ()}, ()),
        ({"layout": replace(LAYOUT, dtype="f32")}, ()),
    ],
)
def test_graph_rows(changed, rows):
    assert replace(CHOOSER, **changed).graph_rows() == rows


@pytest.mark.parametrize("step", [Step(-1), Step(1, -1), Step(1, 0, -4), Step(2, 1, 3)])
def test_a_step_that_cannot_be_is_refused(step: Step):
    with pytest.raises(UsageError):
        CHOOSER.choose(step)


@pytest.mark.parametrize("classes", [(0,), (True,), ("1",), (1, -2)])
def test_classes_are_numbers_of_rows(classes):
    with pytest.raises(UsageError, match="give each the most rows"):
        checked_classes(classes)


STEPS = st.builds(Step, st.integers(0, 20), st.integers(0, 6), st.just(0), st.booleans()) | st.builds(
    Step, st.integers(0, 4), st.integers(0, 3), st.integers(16, 64)
)
CHOOSERS = st.builds(
    Chooser,
    st.sampled_from(("llm", "other")),
    st.just("rocm"),
    st.sampled_from(("gfx942", "gfx950")),
    st.integers(1, 8),
    st.builds(FfnLayout, st.integers(0, 64), st.integers(0, 64), st.integers(0, 64), st.sampled_from(("bf16", "f16"))),
    st.sets(st.sampled_from((1, 2, 4, 8, 16, 48))).map(lambda found: checked_classes(tuple(found))),
    st.lists(
        st.builds(Rule, st.integers(0, 48), st.sampled_from(("*", "llm")), st.sampled_from(("*", "gfx950"))), max_size=3
    ).map(tuple),
    st.none() | st.integers(0, 48),
)


@given(CHOOSERS, st.lists(STEPS, max_size=5))
def test_ranks_whose_choosers_read_the_same_choose_the_same(chooser: Chooser, steps: list[Step]):
    """The vote compares ``repr``: another rank's chooser, made from the same words, must say the same."""
    names = {"Chooser": Chooser, "FfnLayout": FfnLayout, "Rule": Rule}
    text = repr(chooser)
    ast.parse(text, mode="eval")
    fields = text.replace(", kernel='mono_ffn'", "")
    other = eval(fields, names)
    for step in steps:
        choice = chooser.choose(step)
        assert other.choose(step) == choice
        if choice.rows_class:
            rule = next(rule for rule in chooser.rules if rule.covers(chooser.model, chooser.arch, chooser.world))
            most = min(rule.rows, 48 if chooser.pays is None else chooser.pays)
            assert 0 < step.rows <= min(choice.rows_class, most)
            assert not step.prefill
            assert not any(step.rows <= one < choice.rows_class for one in chooser.classes)
            assert choice.rows_class in chooser.classes


@given(CHOOSERS, st.integers(1, 60))
def test_a_row_count_is_mono_exactly_if_a_graph_can_take_it(chooser: Chooser, rows: int):
    graphs = chooser.graph_rows()
    assert bool(chooser.choose(Step(rows)).rows_class) == (rows <= max(graphs, default=0))
    assert all(chooser.choose(Step(one)).rows_class for one in graphs)


def test_choosing_needs_no_torch():
    from flycomm.mono import choice

    found = {node.module for node in ast.walk(ast.parse(Path(choice.__file__).read_text())) if hasattr(node, "module")}
    assert not any(str(name).startswith(("torch", "flycomm.communicator", "flycomm.session")) for name in found)
