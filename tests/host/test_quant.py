# SPDX-License-Identifier: Apache-2.0
"""f32 to e4m3: torch's saturating cast to the bit, and the scales of rows and groups."""

from functools import cache

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
import torch

from flycomm import targets
from flycomm.kernels._launch import null_pointer
from flycomm.primitives import quant
from flycomm.primitives.access import load_fragment, store_element
from flycomm.primitives.quant import E4M3FN, E4M3FNUZ
from tests.host.norm_reference import cast, quantize
from tests.ranks import same_bits

FORMATS = [E4M3FN, E4M3FNUZ]
THREADS = 128
FLOOR = 1e-4


@pytest.fixture(autouse=True)
def target():
    chosen = targets.pick()
    targets.activate(chosen)
    return chosen


@cache
def kernel(body, fmt, blocks, warp):
    """``body(fmt, x, codes, scales, slots)`` by every thread; a fragment of 4 f32 each."""

    @flyc.kernel(known_block_size=[THREADS, 1, 1])
    def quantize_all(x: fx.Pointer, codes: fx.Pointer, scales: fx.Pointer):
        slots = fx.SharedAllocator().allocate(fx.Array[fx.Float32, 2 * THREADS]).peek()
        body(fmt, *(fx.Int64(fx.ptrtoint(pointer)) for pointer in (x, codes, scales)), slots)

    @flyc.jit
    def launch(x: fx.Pointer, codes: fx.Pointer, scales: fx.Pointer, stream: fx.Stream):
        quantize_all(x, codes, scales).launch(grid=(blocks,), block=(THREADS,), stream=stream)

    f32 = null_pointer(fx.Float32, 16)
    return flyc.compile(launch, f32, null_pointer(fx.Uint8, 4), f32, fx.Stream(None))


def run(target, body, fmt, x, scales, warp=0):
    device = torch.device(target.runtime.torch_device_type, 0)
    rest = -x.numel() % (4 * THREADS)
    padded = torch.nn.functional.pad(x.flatten(), (0, rest)).to(device)
    codes, scales = torch.full((padded.numel(),), 0xAA, dtype=torch.uint8, device=device), scales.to(device)
    launch = kernel(body, fmt, padded.numel() // (4 * THREADS), warp)
    launch(padded.data_ptr(), codes.data_ptr(), scales.data_ptr(), target.runtime.current_stream(0))
    target.runtime.synchronize(0)
    return codes.cpu()[: x.numel()].view(x.shape), scales.cpu()


def _index():
    return fx.Int32(fx.block_idx.x) * fx.Int32(THREADS) + fx.Int32(fx.thread_idx.x)


def _static(fmt, x, codes, scales, slots):
    scale = load_fragment(scales, fx.Float32)[0]
    fragment = load_fragment(x + fx.Int64(_index()) * fx.Int64(16), fx.Float32)
    quant.store(codes + fx.Int64(_index()) * fx.Int64(4), quant.quantize(fragment, scale, fmt))


def _with(fmt, x, codes, scales, amax_of, place):
    fragment = load_fragment(x + fx.Int64(_index()) * fx.Int64(16), fx.Float32)
    scale = quant.scale_of(amax_of(fragment), fmt, FLOOR)
    store_element(scales + fx.Int64(place) * fx.Int64(4), scale)  # the same from every thread
    quant.store(codes + fx.Int64(_index()) * fx.Int64(4), quant.quantize(fragment, scale, fmt))


def _token(fmt, x, codes, scales, slots):
    """A row a block."""

    def amax(fragment):
        return quant.amax_of_row([fragment], slots, fx.Int32(0), THREADS)

    _with(fmt, x, codes, scales, amax, fx.Int32(fx.block_idx.x))


def _group(fmt, x, codes, scales, slots):
    _with(fmt, x, codes, scales, quant.amax_of_group, _index() // fx.Int32(32))


def every_rounding(fmt):
    """Around every finite code, and the middle between it and the next: the value, and the f32 on both sides of it."""
    codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, fmt.torch_name)).float()
    values = codes[codes.isfinite()].sort().values
    exact = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor([fmt.largest * 1.06, 1e30, 1e-30, 0.0])])
    words = torch.cat([exact, -exact]).view(torch.int32)
    return torch.cat([words - 1, words, words + 1]).view(torch.float32)


def any_words(count):
    words = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(3))
    return words.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.torch_name)
def test_it_is_torchs_saturating_cast(target, fmt):
    bf16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), -float("nan"), fmt.largest])
    x = torch.cat([every_rounding(fmt), any_words(1 << 15), bf16, special])
    codes, _ = run(target, _static, fmt, x, torch.ones(4))
    wrong = codes != cast(x, fmt)
    assert not wrong.any(), (x[wrong][:5], codes[wrong][:5], cast(x, fmt)[wrong][:5])


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.torch_name)
@pytest.mark.parametrize("scale", [0.02, 3.0])
def test_a_static_scale(target, fmt, scale):
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(1)) * 10
    codes, _ = run(target, _static, fmt, x, torch.full((4,), scale))
    assert torch.equal(codes, quantize(x, "static", fmt, FLOOR, scale)[0])


def rows_of_all_kinds():
    x = torch.randn(6, 512, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 6, 6)[:, None]
    x[1] = 0.0
    x[2, 300] = float("nan")
    x[3, 17] = -float("inf")
    return x


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.torch_name)
@pytest.mark.parametrize(("how", "body"), [("token", _token), ("group", _group)])
def test_scales_of_rows_and_groups(target, fmt, how, body):
    x = rows_of_all_kinds()
    want_codes, want_scales = quantize(x, how, fmt, FLOOR)
    codes, scales = run(target, body, fmt, x, torch.zeros_like(want_scales))
    nan = want_scales.isnan()
    assert torch.equal(scales.isnan(), nan)
    assert same_bits(scales[~nan], want_scales[~nan])
    assert torch.equal(codes, want_codes)
    assert (scales[1] == FLOOR).all()


@pytest.mark.host_only
@pytest.mark.parametrize("body", [_token, _group])
def test_no_bit_depends_on_the_warp(target, body, monkeypatch):
    results = []
    for warp in (32, 64):
        monkeypatch.setenv("FLYCOMM_HOST_WARP", str(warp))
        results.append(run(target, body, E4M3FN, rows_of_all_kinds(), torch.zeros(24), warp=warp)[0])
    assert torch.equal(*results)


def test_the_format_of_a_chip():
    assert quant.native("gfx942") is E4M3FNUZ
    assert quant.native("gfx950") is quant.native("sm_90") is E4M3FN
