# SPDX-License-Identifier: Apache-2.0
"""The runner on ranks: agreed when made, the same form everywhere, and a wrong mono kernel found at once."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from flycomm import tables, targets
from flycomm.errors import DisagreementError, UsageError
from flycomm.kernels.mono_ffn import Layer, slot_bytes
from flycomm.mono import FfnLayer, FfnLayout, Rule, Runner, Step
from tests.host.test_mono_ffn import EPS, SMALL, everything
from tests.ranks import run, same_bits

LAYOUT = FfnLayout(*SMALL)


class Form:
    """One form of a layer: adds ``off`` to ``x``, and counts its calls."""

    def __init__(self, off=0.0):
        self.off, self.calls = off, 0

    def __call__(self, x, residual):
        self.calls += 1
        return x + self.off, residual


def forms(comm, wrong_on=None, off=1.0, **options):
    mono = {rows: Form(off if comm.rank == wrong_on and rows == 4 else 0.0) for rows in (1, 4)}
    separate = Form()
    return mono, separate, Runner(comm, "llm", LAYOUT, mono, separate, **options)


def inputs(rows=1):
    x = torch.linspace(-1, 1, 8).repeat(rows, 1)
    return x, 2 * x


def calls(mono, separate):
    return mono[1].calls, mono[4].calls, separate.calls


def test_a_step_goes_to_the_form_that_is_chosen():
    def body(comm):
        mono, separate, runner = forms(comm)
        for step in (Step(1), Step(3), Step(1, drafts=3), Step(5), Step(1, prefill=True)):
            runner(step, *inputs())
        assert calls(mono, separate) == (1, 2, 2)
        assert runner.graph_rows() == (1, 4)
        assert runner.why(Step(5)) == "separate: 5 rows are over 4, the largest mono layer"
        with pytest.raises(UsageError, match="do not fit a graph of 2"):
            runner(Step(3, padded=2), *inputs())

    run(2, body)


@pytest.mark.parametrize("what", ["model", "rules", "classes", "check_first"])
def test_ranks_that_differ_are_told(what):
    def body(comm):
        odd = comm.rank == 1
        mono = {1: Form()} if odd and what == "classes" else {1: Form(), 2: Form()}
        with pytest.raises(DisagreementError, match="ranks differ in rank 0 has"):
            Runner(
                comm,
                "other" if odd and what == "model" else "llm",
                LAYOUT,
                mono,
                Form(),
                rules=(Rule(rows=2 if odd and what == "rules" else 16),),
                check_first=odd and what == "check_first",
            )

    run(2, body)


@pytest.mark.parametrize("wrong_on", [None, 0, 2])
def test_check_first_finds_a_wrong_kernel_on_any_rank(wrong_on, caplog):
    def body(comm):
        mono, separate, runner = forms(comm, wrong_on, check_first=True)
        x, residual = inputs(3)
        for step in (Step(1), Step(1), Step(3), Step(3), Step(1)):
            out, _ = runner(step, x, residual)
            assert torch.equal(out, x)
        assert calls(mono, separate) == ((3, 2, 2) if wrong_on is None else (2, 1, 4))
        if wrong_on is not None:
            assert f"rank {wrong_on}: tensor 0 is off by 1" in runner.why(Step(1))
            assert runner.graph_rows() == ()

    with caplog.at_level(logging.WARNING, "flycomm"):
        run(3, body)
    said = [record.getMessage() for record in caplog.records if "separate kernels from now on" in record.getMessage()]
    assert len(said) == (0 if wrong_on is None else 3)  # once a rank


@pytest.mark.parametrize(("off", "wrong"), [(0.01, False), (0.1, True), (float("nan"), True), (float("inf"), True)])
def test_tolerance_is_a_share_of_the_largest_element(off, wrong):
    def body(comm):
        _, _, runner = forms(comm, 0, off, check_first=True, tolerance=0.02)
        runner(Step(4), *inputs())
        assert (runner.graph_rows() == ()) == wrong

    run(1, body)


def test_a_result_of_another_kind_is_a_difference():
    def body(comm):
        x, residual = inputs()
        for other in (lambda x, r: x, lambda x, r: (x, r[:0]), lambda x, r: (x.double(), r)):
            runner = Runner(comm, "llm", LAYOUT, {1: other}, Form(), check_first=True)
            assert torch.equal(runner(Step(1), x, residual)[0], x)
            assert "tensor" in runner.why(Step(1))
        with pytest.raises(UsageError, match="tolerance=0"):
            Runner(comm, "llm", LAYOUT, {1: Form()}, Form(), tolerance=0)

    run(1, body)


def test_debug_mode_compares_steps():
    def body(comm):
        _, _, runner = forms(comm)
        runner(Step(1), *inputs())
        with pytest.raises(DisagreementError, match="mono runner of llm"):
            runner(Step(1 + comm.rank), *inputs())

    run(2, body, debug=True)


def test_the_agreed_table_limits_what_is_mono(tmp_path):
    def body(comm):
        return forms(comm)[2].why(Step(2))

    arch = run(1, lambda comm: targets.active().capabilities(0).arch)[0]
    base = replace(tables.shipped(arch), arch=arch)
    path = tmp_path / "table.json"
    for worlds, said in (((1, 8), "separate: 2 rows are over 1, what pays by the dispatch table"), ((3, 8), "mono: ")):
        one = replace(base, mono=(tables.Pays("mono_ffn", worlds, *SMALL[:2], 1),))
        path.write_text(one.to_json())
        assert all(why.startswith(said) for why in run(2, body, table=str(path)))


def test_the_real_layer_passes_its_check():
    layer = Layer(*SMALL, 2)

    def separate(comm):
        def call(x, residual, gate_up, down, norm_weight, projection, eps):
            gate, up = (x.float() @ gate_up.float().T).chunk(2, dim=1)
            partial = ((torch.nn.functional.silu(gate) * up).bfloat16().float() @ down.float().T).bfloat16()
            normed, out = comm.all_reduce_rms_norm(partial, residual, norm_weight, eps)
            return (normed.float() @ projection.float().T).bfloat16(), out

        return call

    def body(comm):
        mono = {2: FfnLayer(comm, "ffn", layer, 64)}
        runner = Runner(comm, "llm", LAYOUT, mono, separate(comm), check_first=True)
        arguments = [one.to(comm.device) for one in everything(2, 2, 0, *SMALL)[comm.rank]]
        first = runner(Step(2), *arguments, EPS)
        again = runner(Step(2), *arguments, EPS)
        assert runner.why(Step(2)).startswith("mono: ")
        return all(same_bits(a, b) for a, b in zip(first, again, strict=True))

    assert all(run(2, body, kernel_channels={"ffn": (2, slot_bytes(layer))}))
