# SPDX-License-Identifier: Apache-2.0
"""The tile product: integers to the bit, near f64, the same bits at every place, and narrow floats decoded exactly."""

from functools import cache

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
import torch

from flycomm import targets
from flycomm.kernels._launch import null_pointer
from flycomm.primitives import decode, matrix
from flycomm.primitives.access import load_fragment, store_element
from flycomm.primitives.quant import E4M3FN, E4M3FNUZ, native
from tests.ranks import same_bits

ELEMENTS = [matrix.BF16, E4M3FN, E4M3FNUZ]
LENGTH = 128  # elements of a row
# Of the sum of magnitudes: what an f32 sum may be off by, and what is granted to matrix units for 8-bit operands.
F32, FP8_UNITS = 2.0**-17, 2.0**-11


@pytest.fixture(autouse=True)
def target():
    chosen = targets.pick()
    targets.activate(chosen)
    return chosen


@pytest.fixture(params=[0, pytest.param(64, marks=pytest.mark.host_only)], ids=["own warp", "warp of 64"])
def warp(request, monkeypatch):
    if request.param:
        monkeypatch.setenv("FLYCOMM_HOST_WARP", str(request.param))
    return request.param


def torch_type(element):
    return torch.bfloat16 if element == matrix.BF16 else getattr(torch, element.torch_name)


def address(pointer):
    return fx.Int64(fx.ptrtoint(pointer))


@cache
def product_kernel(element, tiles, warp):
    """``tiles`` tiles of B; ``warp`` is a key of the cache."""
    row_bytes = LENGTH * (2 if element == matrix.BF16 else 1)
    segments = row_bytes // matrix.SEGMENT

    @flyc.kernel(known_block_size=[64, 1, 1])
    def product(a: fx.Pointer, b: fx.Pointer, d: fx.Pointer):
        form = matrix.layout()
        lane = form.lane()

        def quarters(base, row):
            begin = base + fx.Int64(row) * fx.Int64(row_bytes) + fx.Int64(form.quarter(lane)) * fx.Int64(16)
            loaded = [load_fragment(begin + fx.Int64(s * matrix.SEGMENT), fx.Uint32) for s in range(segments)]
            return [matrix.prepare(element, fragment) for fragment in loaded]

        column = form.column(lane)
        parts = [quarters(address(a), column + fx.Int32(p * form.columns)) for p in range(form.parts)]
        left = [[part[s] for part in parts] for s in range(segments)]
        columns = tiles * form.columns
        for tile in fx.range_constexpr(tiles):
            right = quarters(address(b), column + fx.Int32(tile * form.columns))
            result = matrix.multiply(form, element, matrix.zeros(), left, right)
            for group, row in enumerate(form.rows_of(lane)):
                for other, place in enumerate(form.columns_of(lane)):
                    (i,) = set(form.by_row[group]) & set(form.by_column[other])
                    at = row * fx.Int32(columns) + place + fx.Int32(tile * form.columns)
                    store_element(address(d) + fx.Int64(at) * fx.Int64(4), result[i])

    @flyc.jit
    def launch(a: fx.Pointer, b: fx.Pointer, d: fx.Pointer, stream: fx.Stream):
        product(a, b, d).launch(grid=(1,), block=(64,), stream=stream)

    null = null_pointer(fx.Uint8, 16)
    return flyc.compile(launch, null, null, null, fx.Stream(None))


def run(target, element, a, b, warp):
    device = torch.device(target.runtime.torch_device_type, 0)
    a, b = (one.to(torch_type(element)).view(torch.uint8).to(device) for one in (a, b))
    d = torch.full((16, b.shape[0]), float("nan"), device=device)
    launch = product_kernel(element, b.shape[0] // columns(target, warp), warp)
    launch(a.data_ptr(), b.data_ptr(), d.data_ptr(), target.runtime.current_stream(0))
    target.runtime.synchronize(0)
    return d.cpu()


def columns(target, warp):
    return 16 if (warp or target.capabilities(0).warp_size) == 64 else 8


def randn(rows, seed, element):
    values = torch.randn(rows, LENGTH, generator=torch.Generator().manual_seed(seed))
    return values.to(torch_type(element)).float()


def limit(target, element):
    units = target.name == "rocm" and element == native(target.capabilities(0).arch)
    return FP8_UNITS if units else F32


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_integers_are_exact(target, element, warp):
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-3, 4, (rows, LENGTH), generator=generator).float() for rows in (16, 32))
    assert torch.equal(run(target, element, a, b, warp), a @ b.T)


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_it_is_near_the_product_in_f64(target, element, warp):
    a, b = randn(16, 1, element), randn(32, 2, element)
    off = (run(target, element, a, b, warp).double() - a.double() @ b.double().T).abs()
    assert (off <= limit(target, element) * (a.abs() @ b.abs().T)).all()


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_no_bit_depends_on_the_place(target, element, warp):
    a, b = randn(16, 3, element), randn(32, 4, element)
    whole = run(target, element, a, b, warp)
    rows, order = (torch.randperm(n, generator=torch.Generator().manual_seed(5)) for n in (16, 32))
    assert same_bits(run(target, element, a[rows], b[order], warp), whole[rows][:, order].contiguous())


def test_a_nan_stays_in_its_row_and_column(target, warp):
    for element in ELEMENTS[:2]:
        a, b = randn(16, 6, element), randn(32, 7, element)
        a[5, 17] = b[9, 100] = float("nan")
        found = run(target, element, a, b, warp).isnan()
        want = torch.zeros(16, 32, dtype=torch.bool)
        want[5], want[:, 9] = True, True
        assert torch.equal(found, want)


# ---- decoding


def _decoded(target, body, codes, outputs):
    """``body`` of every thread's fragment of ``codes`` → ``outputs`` f32 a thread."""
    threads = 64

    @flyc.kernel(known_block_size=[threads, 1, 1])
    def decoded(source: fx.Pointer, out: fx.Pointer):
        thread = fx.Int64(fx.thread_idx.x)
        values = body(load_fragment(address(source) + thread * fx.Int64(16), fx.Uint32), fx.Uint32(fx.thread_idx.x))
        for i, value in enumerate(values):
            store_element(address(out) + (thread * fx.Int64(outputs) + fx.Int64(i)) * fx.Int64(4), value)

    @flyc.jit
    def launch(source: fx.Pointer, out: fx.Pointer, stream: fx.Stream):
        decoded(source, out).launch(grid=(1,), block=(threads,), stream=stream)

    device = torch.device(target.runtime.torch_device_type, 0)
    null = null_pointer(fx.Uint8, 16)
    padded = torch.zeros(threads * 16, dtype=torch.uint8)
    padded[: codes.numel()] = codes
    padded, out = padded.to(device), torch.zeros(threads, outputs, device=device)
    handle = flyc.compile(launch, null, null, fx.Stream(None))
    handle(padded.data_ptr(), out.data_ptr(), target.runtime.current_stream(0))
    target.runtime.synchronize(0)
    return out.cpu()


@pytest.mark.parametrize("fmt", ELEMENTS[1:], ids=lambda fmt: fmt.torch_name)
def test_every_code_of_fp8(target, fmt):
    codes = torch.arange(256, dtype=torch.uint8)
    found = _decoded(target, lambda fragment, _: decode.fp8_values(fragment, fmt), codes, 16)[:16]
    found = found.view(16, 4, 4).transpose(1, 2).reshape(256)  # the lowest byte of every word came first
    want = codes.view(torch_type(fmt)).float()
    assert torch.equal(found.isnan(), want.isnan())
    assert same_bits(found.nan_to_num(7), want.nan_to_num(7))


def test_every_code_of_fp4_with_scales(target):
    """A word has 8 elements, and becomes a fragment of bf16."""
    scales = [1, 64, 100, 126, 127, 128, 200, 251]
    packed = torch.tensor([low | high << 4 for low in range(16) for high in range(16)], dtype=torch.uint8)
    codes = packed.repeat(3)

    def body(fragment, thread):
        code = fx.Uint32(scales[0])
        for i, scale in enumerate(scales):
            code = (thread % fx.Uint32(len(scales)) == fx.Uint32(i)).select(fx.Uint32(scale), code)
        made = decode.e2m1_fragments(fragment, decode.ue8m0_value(code))
        return [fx.Uint32(word[i]).bitcast(fx.Float32) for word in made for i in range(4)]

    found = _decoded(target, body, codes, 16)[:48].contiguous().view(torch.bfloat16).float()
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat([magnitudes, -magnitudes])
    elements = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], 1).view(48, 32)
    factor = torch.tensor([2.0 ** (scales[thread % len(scales)] - 127) for thread in range(48)])
    assert same_bits(found, elements * factor[:, None])
