# SPDX-License-Identifier: Apache-2.0
"""Arithmetic and conversions on the host target have the bits that torch gives on the CPU."""

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
import torch

from tests.host.host_target import activate, at, load, pointer, store

pytestmark = pytest.mark.host_only

TYPES = {
    torch.float32: fx.Float32,
    torch.float16: fx.Float16,
    torch.bfloat16: fx.BFloat16,
    torch.float64: fx.Float64,
    torch.int32: fx.Int32,
    torch.int64: fx.Int64,
    torch.int16: fx.Int16,
    torch.uint8: fx.Uint8,
}
THREADS = 64
WIDTH = 8  # elements of a vector


@pytest.fixture(autouse=True)
def host():
    return activate()


@flyc.kernel
def _convert_kernel(x: fx.Int64, y: fx.Int64, n: fx.Int32, source: type[fx.Numeric], target: type[fx.Numeric]):
    """Scalars from the front half, vectors of 8 from the back half."""
    t = fx.Int32(fx.block_idx.x) * THREADS + fx.Int32(fx.thread_idx.x)
    if t < n:
        store(y, t, load(x, t, source).to(target))
    if t < n // WIDTH:
        index = fx.Int64(n) + fx.Int64(t) * WIDTH
        values = fx.generic_load(pointer(x + index * (source.width // 8), source), dtype=source, count=WIDTH)
        fx.generic_store(pointer(y + index * (target.width // 8), target), values.to(target))


@flyc.jit
def _convert(x: fx.Int64, y: fx.Int64, n: fx.Int32, source: type[fx.Numeric], target: type[fx.Numeric]):
    blocks = (n + THREADS - 1) // THREADS
    _convert_kernel(x, y, n, source, target).launch(grid=(blocks,), block=(THREADS,))


def convert(x, dtype):
    twice = torch.cat([x, x])
    y = torch.zeros(twice.shape, dtype=dtype)
    _convert(at(twice), at(y), x.numel(), TYPES[x.dtype], TYPES[dtype])
    scalars, vectors = y[: x.numel()], y[x.numel() :]
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[y.element_size()]
    assert torch.equal(scalars.view(bits), vectors.view(bits)), "scalars and vectors differ"
    return scalars


def same(left, right):
    """Equal bits, any NaN equal to any."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    nan = left.isnan()
    assert torch.equal(nan, right.isnan())
    return torch.equal(left.view(bits)[~nan], right.view(bits)[~nan])


def interesting_f32():
    """Every sign and exponent with mantissas around the ties of 16-bit rounding, and a spread of others."""
    mantissas = [0, 1, 2, 0x7FFFFF, 0x7FFFFE, 0x400000, 0x3FFFFF, 0x400001]
    for bit in (12, 13, 15, 16):  # half a unit of f16 and of bf16, even and odd below it
        tie = 1 << bit
        mantissas += [tie, tie - 1, tie + 1, 3 * tie, 3 * tie - 1, 3 * tie + 1, 5 * tie, 7 * tie]
    exponents = torch.arange(256, dtype=torch.int64) << 23
    words = (exponents[:, None] | torch.tensor(mantissas)[None, :]).flatten()
    words = torch.cat([words, words | (1 << 31)])
    return words.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_f32_to_16_bits_rounds_to_nearest_even(dtype):
    x = interesting_f32()
    assert same(convert(x, dtype), x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_widens_and_comes_back(dtype):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    wide = convert(x, torch.float32)
    assert same(wide, x.float())
    assert same(convert(wide, dtype), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_nan_stays_a_quiet_nan_of_its_sign(dtype):
    words = torch.tensor(
        [0x7F800001, 0x7FC00000, 0xFF800001, 0xFFFFFFFF, 0x7F80FFFF, 0x7FFFFFFF, 0x7FA00000, 0xFFA00000]
    )
    y = convert(words.to(torch.int32).view(torch.float32), dtype)
    quiet = 0x0040 if dtype == torch.bfloat16 else 0x0200
    assert y.isnan().all()
    assert ((y.view(torch.int16).int() & quiet) != 0).all()


def test_f64_to_f16_rounds_once():
    x = interesting_f32().double()
    x = torch.cat([x, x * (1 + 2**-40), x * (1 - 2**-40)])
    x = x[(x.abs() < 65520) & (x.abs() > 1e-9)]
    expected = torch.from_numpy(x.numpy().astype("float16"))
    assert same(convert(x[: x.numel() // 8 * 8], torch.float16), expected[: x.numel() // 8 * 8])


@pytest.mark.parametrize("source", [torch.int32, torch.int64, torch.int16, torch.uint8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_integers_to_floats(source, dtype):
    x = torch.arange(-200 if source != torch.uint8 else 0, 200).to(source)
    assert same(convert(x, dtype), x.to(dtype))


@flyc.kernel
def _arithmetic_kernel(x: fx.Int64, y: fx.Int64, z: fx.Int64, n: fx.Int32, dtype: type[fx.Numeric]):
    t = fx.Int32(fx.block_idx.x) * THREADS + fx.Int32(fx.thread_idx.x)
    if t < n:
        a, b = load(x, t, dtype), load(y, t, dtype)
        store(z, t * 3, a + b)
        store(z, t * 3 + 1, a - b)
        store(z, t * 3 + 2, a * b)


@flyc.jit
def _arithmetic(x: fx.Int64, y: fx.Int64, z: fx.Int64, n: fx.Int32, dtype: type[fx.Numeric]):
    blocks = (n + THREADS - 1) // THREADS
    _arithmetic_kernel(x, y, z, n, dtype).launch(grid=(blocks,), block=(THREADS,))


@pytest.mark.parametrize("dtype", TYPES)
def test_arithmetic(dtype):
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(1000, generator=generator) * 50 for _ in range(2))
    if not dtype.is_floating_point:
        x, y = x.abs().long(), y.abs().long()
    x, y = x.to(dtype), y.to(dtype)
    z = torch.zeros(1000, 3, dtype=dtype)
    _arithmetic(at(x), at(y), at(z), 1000, TYPES[dtype])
    assert torch.equal(z, torch.stack([x + y, x - y, x * y], dim=1))


def test_denormals_survive_a_thread_that_flushes_them():
    x = torch.tensor([1e-40, -3e-45, 1.2e-38, 5e-324] * 2)
    torch.set_flush_denormal(True)
    try:
        y = convert(x, torch.bfloat16)
        z = torch.zeros(8, 3)
        _arithmetic(at(x), at(x), at(z), 8, fx.Float32)
    finally:
        torch.set_flush_denormal(False)
    assert same(y, x.to(torch.bfloat16))
    assert torch.equal(z[:, 0], x + x)
