# SPDX-License-Identifier: Apache-2.0
"""What a caller may get wrong: one sentence with the value, the limit and the remedy, before anything is launched."""

from __future__ import annotations

import pytest
import torch

import flycomm
from flycomm import bench
from flycomm.__main__ import main
from flycomm.errors import ClosedError, CommTimeout, DisagreementError, UsageError
from flycomm.indexer import BLOCK_MAX, DSA, Indexer, IndexerCP, IndexScores, ShardLayout
from flycomm.kernels import mono_attention_out
from flycomm.kernels.mono_ffn import Layer, slot_bytes
from flycomm.mono import FfnLayer, FfnLayout, IndexerLayer, Rule, Runner, Step
from flycomm.ops.topk import topk_workspace
from tests.ranks import run

LAYER = Layer(64, 64, 64, 1)
LAYOUT = FfnLayout(64, 64, 64)
CHANNELS = {"ffn": (1, slot_bytes(LAYER))}
BF16 = torch.bfloat16


def refused(calls, comm):
    """Each call raises :class:`UsageError` with these words, and with no other error behind it."""
    for call, words in calls:
        with pytest.raises(UsageError, match=words) as caught:
            call(comm)
        assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_bytes": "1MiB"}, "max_bytes='1MiB' is not a number of bytes"),
        ({"timeout": "3"}, "timeout='3' is not a number of seconds"),
        ({"channels": 1.5}, r"channels=1.5 is not in 1..16"),
        ({"topk": 16}, r"topk=16 is not 1..64 rows .*; pass topk=\(rows, k\)"),
        ({"topk": (1, 2, 3)}, r"topk=\(1, 2, 3\) is not 1..64 rows"),
        ({"topk": (4.0, 8)}, r"topk=\(4.0, 8\) is not"),
        ({"kernel_channels": ["ffn"]}, r"kernel_channels=\['ffn'\] is not a dict"),
        ({"kernel_channels": {"ffn": 4}}, r"kernel channel 'ffn': 4 is not \(blocks, bytes\)"),
        ({"kernel_channels": {"ffn": (1, "16")}}, r"kernel channel 'ffn': .* is not \(blocks, bytes\)"),
        ({"table": 3}, "table=3 is not a path"),
        ({"name": 5}, "name=5 not a string"),
    ],
    ids=str,
)
def test_options_of_init(options, words):
    with pytest.raises(UsageError, match=words):
        run(1, lambda comm: None, **options)


def test_a_world_is_one():
    with pytest.raises(UsageError, match=r"world='x' is not a flycomm.World"):
        flycomm.init(world="x")
    with pytest.raises(UsageError, match="a world of '2' ranks"):
        flycomm.World.local("2")


def test_an_option_that_one_rank_has_wrong_is_an_error_on_all():
    def body(world):
        with pytest.raises(DisagreementError, match=r"options of flycomm\.init"):
            flycomm.init(world=world, channels=99 if world.rank else 1)

    flycomm.World.local(2).run(body, timeout=60)


def test_calls_of_a_communicator():
    def body(comm):
        x = torch.ones(2, 8, device=comm.device)
        w, ids = x[0].contiguous(), torch.zeros(2, 3, dtype=torch.int32, device=comm.device)
        refused(
            [
                (lambda c: c.all_reduce([1.0]), "the input is a list; pass a tensor"),
                (lambda c: c.all_reduce(None), "the input is None"),
                (lambda c: c.all_reduce(x.cpu().numpy()), "the input is a ndarray"),
                (lambda c: c.all_reduce(x.to_sparse()), r"torch.sparse_coo; pass a dense one"),
                (lambda c: c.all_reduce(x, ["sum"]), r"op=\['sum'\] is not a name"),
                (lambda c: c.all_reduce(x, channel=3), r"channel 3 is not in 0..0"),
                (lambda c: c.all_reduce(x, out="x"), "out is a str"),
                (lambda c: c.all_reduce_(x[:1].expand(2, 8)), "its elements share memory"),
                (lambda c: c.plan("broadcast", BF16, 64), "op='broadcast' is not one of all_reduce"),
                (lambda c: c.plan("all_reduce", "bf16", 64), "dtype 'bf16' is not torch's"),
                (lambda c: c.plan("all_reduce", BF16, -64), "num_bytes=-64"),
                (lambda c: c.plan_rms_norm(BF16, -1, 64), "-1 rows of 64 elements"),
                (lambda c: c.should_use("x"), "the input is a str"),
                (lambda c: c.prepare(BF16), "not sequences of dtypes"),
                (lambda c: c.prepare(["bf16"]), "dtype 'bf16' is not torch's"),
                (lambda c: c.all_reduce_rms_norm(x, None, w), "residual is None"),
                (lambda c: c.all_reduce_rms_norm(x, x, w, "small"), "eps='small' is not a number"),
                (lambda c: c.all_reduce_rms_norm_quant(x, x, w, "static", 0.5), "scale is a float; pass a tensor"),
                (lambda c: c.moe_finalize_all_reduce_rms_norm(x, None, x, w, index=ids), "topk_weights is None"),
                (lambda c: c.put_signal("next"), r"rank 'next' is not in 0..0"),
                (lambda c: c.get_buffer(0, 4, BF16), "shape 4 is not a sequence"),
                (lambda c: c.get_buffer(0, (-4,), BF16), r"shape \(-4,\) is not a sequence of whole numbers"),
                (lambda c: c.empty((-2, -3), BF16), r"shape \(-2, -3\)"),
                (lambda c: c.empty((2,), "bf16"), "dtype 'bf16' is not torch's"),
                (lambda c: c.trace(None), "path=None is not a path"),
                (lambda c: c.trace("x.json", records=1 << 60), "not a number up to"),
            ],
            comm,
        )
        comm.close()
        for call in (lambda: comm.plan("all_reduce", BF16, 64), lambda: comm.should_use(x)):
            with pytest.raises(ClosedError):
                call()

    run(1, body)


def test_top_k():
    def body(comm):
        x = torch.ones(2, 8, device=comm.device)
        lengths = torch.full((2,), 8, dtype=torch.int32, device=comm.device)
        refused(
            [
                (lambda c: c.topk_exchange([[1.0]], None, 1), "the input is a list"),
                (lambda c: c.topk_exchange(x, [8, 8], 2), "lengths is a list"),
                (lambda c: c.topk_exchange(x, None, 2.0), r"k=2.0 is not in 1..2048"),
                (lambda c: c.topk_exchange(x, None, 2, layout="x"), "layout='x' is not a ShardLayout"),
                (lambda c: c.topk_exchange(x, lengths, 2, forced=1), "forced=1 is not two numbers"),
                (lambda c: c.topk_exchange(x, lengths, 2, forced=(1,)), r"forced=\(1,\) is not two numbers"),
                (lambda c: c.topk_exchange(x, None, 8, ids=[1]), "ids is a list"),
                (lambda c: topk_workspace(-1, 8, 2, "cpu"), "-1 rows of 8 columns"),
                (lambda c: topk_workspace(1, -8, 2, "cpu"), "1 rows of -8 columns"),
            ],
            comm,
        )

    run(1, body, topk=(2, 8))


def test_indexers():
    scores = DSA, "e4m3fn"
    options = {"layout": ShardLayout(1, 64), "rows": 1, "max_tokens": 1024, "page": 64, "scorer": None}

    def made(comm, indexer=DSA, **changed):
        return IndexerCP(comm, indexer, **options | changed)

    def body(comm):
        good = made(comm)
        refused(
            [
                (lambda c: Indexer("dsa", "8"), "no whole number"),
                (lambda c: Indexer("dsa", 8, forced=(1,)), r"forced=\(1,\) is not two numbers"),
                (lambda c: ShardLayout("2"), "no whole number"),
                (lambda c: IndexScores(c, *scores, heads=0, page=64), "0 heads of"),
                (lambda c: IndexScores(c, *scores, heads=16, page="64"), "pages of '64' tokens"),
                (lambda c: IndexScores(c, *scores, heads=16, page=64, token_stride=16), "under the 128 bytes of a key"),
                (lambda c: made(c, None), "indexer=None is not of"),
                (lambda c: made(c, layout=None), "layout=None is not of"),
                (lambda c: made(c, Indexer("dsa", 4096)), "k=4096 keys of a list are over 2048"),
                (lambda c: made(c, order="id"), "order='id' is not one of score, index"),
                (lambda c: made(c, tie_break="x"), "tie_break='x' is not one of low, high"),
                (lambda c: made(c, parallel="yes"), "parallel='yes' is not one of None, True, False"),
                (lambda c: made(c, rows="2"), "rows='2'"),
                (lambda c: made(c, max_tokens=1 << 25), "max_tokens=33554432 are over the 16777216"),
                (lambda c: made(c, BLOCK_MAX), "cut keys of 128"),
                (lambda c: good.plan([1]), "seq_lens is a list"),
                (lambda c: good.plan(torch.tensor(4, dtype=torch.int32)), r"seq_lens are \(\)"),
                (lambda c: good.plan(torch.ones(1, dtype=torch.int32), 1.0), "queries=1.0 are counts"),
                (lambda c: good.decode(None, None, None, None, None), "the plan is a NoneType"),
            ],
            comm,
        )

    run(1, body)


def test_mono_layers_and_their_runner():
    def separate(x):
        return x

    def runner(comm, mono=None, separate=separate, layout=LAYOUT, **options):
        return Runner(comm, "llm", layout, {1: separate} if mono is None else mono, separate, **options)

    def body(comm):
        other = mono_attention_out.Layer(64, 64, 8, 2, 1)
        x = torch.ones(1, 64, dtype=BF16, device=comm.device)
        layer = FfnLayer(comm, "ffn", LAYER, 64)
        w = torch.ones(64, 64, dtype=BF16, device=comm.device)
        rest = torch.cat([w, w]), w, x[0], w
        refused(
            [
                (lambda c: FfnLayer(None, "ffn", LAYER), "comm is a NoneType"),
                (lambda c: FfnLayer(c, "ffn", LAYER, 2048), "a block of 2048 threads .* up to 1024"),
                (lambda c: FfnLayer(c, "ffn", LAYER, "64"), "a block of '64' threads"),
                (lambda c: FfnLayer(c, "ffn", other), "is not a flycomm.kernels.mono_ffn.Layer"),
                (lambda c: FfnLayer(c, "ffn", Layer(64.0, 64, 64, 1)), "no whole number"),
                (lambda c: IndexerLayer(c, "ffn", None, 64, 64), "indexer=None"),
                (lambda c: layer(x[0], x, *rest), r"x is \(64,\); pass \(rows, "),
                (lambda c: layer(None, x, *rest), "x is None"),
                (lambda c: layer(x, None, *rest), "residual is None"),
                (lambda c: layer(x, x, *rest, "small"), "eps='small' is not a number"),
                (lambda c: runner(c, layout=LAYER), "no layout; pass a FfnLayout"),
                (lambda c: runner(c, mono=[separate]), "mono is not a dict of calls"),
                (lambda c: runner(c, separate=None), "separate not a call"),
                (lambda c: runner(c, rules=Rule(rows=1)), "rules=Rule.* are not Rules"),
                (lambda c: runner(c, rules=(Rule(rows="1"),)), "are not Rules of whole numbers"),
                (lambda c: runner(c, tolerance="x"), "tolerance='x'"),
                (lambda c: runner(c)(3, x), "3 is not a Step"),
                (lambda c: runner(c).why(Step("1")), "no whole number"),
            ],
            comm,
        )

    run(1, body, kernel_channels=CHANNELS)


def test_a_call_that_differs_says_how_to_find_it():
    def body(comm):
        comm.all_reduce(torch.ones(4 + 4 * comm.rank, device=comm.device))
        comm._session.synchronize()
        with pytest.raises(CommTimeout, match=r"mismatch .*init\(debug=True\) names their calls"):
            comm.check()

    run(2, body, timeout=2.0)


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bench", "all_reduce", "--world", "9", "--bytes", "2KiB"], "a world of 9 ranks is over the limit of 8"),
        (["bench", "all_reduce", "--bytes", "2KiB", "--json", "{file}/x"], "cannot be written (File exists)"),
        (["bench", "all_reduce", "--from", "{rows}", "--plot", "{folder}/x.bmp"], "name a .png file"),
        (["litmus", "--json", "{file}/x"], "cannot be written (File exists)"),
        (["compile", "--arch", "sm_90", "--out", "{file}/x", "--kernel", "barrier_w1_*"], "cannot be written"),
        (["doctor", "--add", "x"], "pass --archive FILE.tar.gz"),
        (["trace", "{trace}", "--blocks", "0"], "0 blocks are none to draw"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_commands(words, says, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    (tmp_path / "trace").write_text('{"traceEvents": [], "otherData": {}}')
    results = bench.__file__.replace("flycomm/bench/__init__.py", "benchmarks/results/h200x2-all_gather.jsonl")
    places = {name: str(tmp_path / name) for name in ("file", "trace")} | {"folder": str(tmp_path), "rows": results}
    assert main([word.format(**places) for word in words]) == 2
    assert says in capsys.readouterr().err
