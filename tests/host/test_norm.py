# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of a row: the documented formula to the bit, whatever the block, the warp and the batch, and near f64."""

from functools import cache

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
import torch

from flycomm import targets
from flycomm.errors import UsageError
from flycomm.kernels._launch import null_pointer
from flycomm.primitives import norm
from flycomm.primitives.row import Rows, load_row, store_row
from flycomm.primitives.row_loop import finish_rows, post_rows
from tests.host.norm_reference import rms_norm, rms_norm_exact, sum_of_squares
from tests.ranks import same_bits

EPS = 1e-6
FX = {torch.float32: fx.Float32, torch.bfloat16: fx.BFloat16, torch.float16: fx.Float16}


@pytest.fixture(autouse=True)
def target():
    chosen = targets.pick()
    targets.activate(chosen)
    return chosen


def _squares(values, inside, weights, hidden, eps, slots, turn, threads, gemma):
    total = norm.sum_of_squares(values, inside, slots, turn, threads)
    return [fx.Vector.filled(value.numel, total, fx.Float32) for value in values]


@cache
def kernel(dtype, weight_dtype, threads, each, gemma, warp, squares, blocks=2):
    """``squares``: every element of the result is the row's sum of squares instead. ``warp`` is a key of the cache."""
    element = FX[dtype]
    result = _squares if squares else norm.rms_norm_row

    @flyc.kernel(known_block_size=[threads, 1, 1])
    def rms_norm_rows(x: fx.Pointer, w: fx.Pointer, y: fx.Pointer, count: fx.Int32, hidden: fx.Int32, eps: fx.Float32):
        slots = fx.SharedAllocator().allocate(fx.Array[fx.Float32, 2 * threads]).peek()
        rows = Rows(count, hidden, element, each, blocks, threads)
        source, out = fx.Int64(fx.ptrtoint(x)), fx.Int64(fx.ptrtoint(y))
        weights = load_row(rows, fx.Int64(fx.ptrtoint(w)), fx.Int32(0), FX[weight_dtype])

        def load(row):
            return load_row(rows, source, row)

        def body(row, turn, own):
            values = [value.to(fx.Float32) for value in own]
            normed = result(values, rows.inside, weights, hidden, eps, slots, turn, threads, gemma)
            store_row(rows, out, row, [value.to(element) for value in normed])

        first = post_rows(rows, load, lambda row, own: None)
        finish_rows(rows, first, load, body, 1)

    @flyc.jit
    def launch(
        x: fx.Pointer, w: fx.Pointer, y: fx.Pointer, count: fx.Int32, hidden: fx.Int32, eps: fx.Float32, s: fx.Stream
    ):
        rms_norm_rows(x, w, y, count, hidden, eps).launch(grid=(blocks,), block=(threads,), stream=s)

    null = null_pointer(element, 16)
    return flyc.compile(launch, null, null_pointer(FX[weight_dtype], 16), null, 1, 1, 1.0, fx.Stream(None))


def run(target, x, weight, threads=64, each=4, gemma=False, warp=0, squares=False):
    device = torch.device(target.runtime.torch_device_type, 0)
    x, weight = x.to(device), weight.to(device)
    y = torch.full_like(x, 7)
    stream = target.runtime.current_stream(0)
    launch = kernel(x.dtype, weight.dtype, threads, each, gemma, warp, squares)
    launch(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.shape[0], x.shape[1], EPS, stream)
    target.runtime.synchronize(0)
    return y.cpu()


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


CASES = [
    (torch.bfloat16, torch.bfloat16, 512, False),
    (torch.bfloat16, torch.float32, 1000, False),
    (torch.bfloat16, torch.bfloat16, 8, True),
    (torch.float16, torch.float16, 2048, False),
    (torch.float16, torch.float32, 1608, True),
    (torch.float32, torch.float32, 1024, False),
    (torch.float32, torch.float32, 516, True),
]


@pytest.mark.parametrize(("dtype", "weight_dtype", "hidden", "gemma"), CASES)
def test_it_is_the_formula_to_the_bit(target, dtype, weight_dtype, hidden, gemma):
    x, weight = randn(5, hidden, dtype=dtype), randn(hidden, seed=1, dtype=weight_dtype)
    got = run(target, x, weight, gemma=gemma)
    want = rms_norm(x.float(), weight, EPS, 16 // x.element_size(), gemma)
    assert same_bits(got, want.to(dtype))


@pytest.mark.parametrize(("threads", "each"), [(64, 4), (64, 7), (256, 1)])
def test_the_sum_of_squares_goes_along_the_documented_tree(target, threads, each):
    x = randn(32, 4 * threads * each - 60)
    got = run(target, x, torch.ones(x.shape[1]), threads, each, squares=True)[:, 0]
    assert same_bits(got, torch.tensor([float(sum_of_squares(row, 4)) for row in x]))


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e15, 1e-25])
def test_it_is_within_four_units_of_the_last_place_of_f64(target, scale):
    x, weight = randn(4, 1024) * scale, randn(1024, seed=1)
    got = run(target, x, weight).double()
    exact = rms_norm_exact(x, weight, EPS)
    unit = torch.exp2(torch.floor(torch.log2(exact.abs())) - 23)
    assert ((got - exact).abs() / unit).max() < 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_bit_depends_on_the_block_or_the_batch(target, dtype):
    hidden = 1000
    x, weight = randn(7, hidden, dtype=dtype), randn(hidden, seed=1, dtype=dtype)
    want = run(target, x, weight, threads=64)
    for threads in (128, 256):
        assert same_bits(run(target, x, weight, threads=threads, each=3), want)
    for row in range(7):
        assert same_bits(run(target, x[row : row + 1].clone(), weight)[0], want[row])


@pytest.mark.host_only
@pytest.mark.parametrize("threads", [64, 128])
def test_no_bit_depends_on_the_warp(target, threads, monkeypatch):
    x, weight = randn(3, 1024), randn(1024, seed=1)
    results = []
    for warp in (32, 64):
        monkeypatch.setenv("FLYCOMM_HOST_WARP", str(warp))
        results.append(run(target, x, weight, threads=threads, warp=warp))
    assert same_bits(*results)


def test_special_rows(target):
    x = randn(6, 512)
    x[0] = 0.0
    x[1] = -0.0
    x[2, 77] = float("nan")
    x[3, 5] = float("inf")
    x[4] = 1e30  # its squares are infinite
    x[5] = 1e-30
    got = run(target, x, torch.ones(512))
    assert same_bits(got[:2], x[:2])
    assert got[2].isnan().all()
    assert got[3, 5].isnan()
    assert (got[3, :5] == 0).all()
    assert (got[4] == 0).all()
    assert torch.allclose(got[5], torch.full((512,), 1e-27), rtol=1e-6, atol=0)


@pytest.mark.parametrize("threads", [32, 96, 1000])
def test_a_block_that_has_no_tree_is_refused(threads):
    with pytest.raises(UsageError, match=f"a block of {threads} threads"):
        norm.check_threads(threads)
