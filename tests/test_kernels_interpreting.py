"""What interpreting.py makes of Triton's interpreter: addresses that are looked at, and a bfloat16 that is torch's."""

import helpers as h
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, so there is nothing to interpret")
if torch.cuda.is_available():
    pytest.skip("kernels are not interpreted where there is a GPU", allow_module_level=True)

import triton
import triton.language as tl


@triton.jit
def copy_kernel(x, y, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i, mask=i < n).to(y.dtype.element_ty))


@pytest.mark.parametrize("read, written, n, message", [(63, 64, 64, "reads 4 bytes"), (64, 63, 1, "writes 4 bytes")])
def test_an_address_outside_of_the_tensors_is_seen(read, written, n, message):
    """What conftest.py has looked at in every test of kernels; two halves of one storage are apart."""
    x, y = torch.zeros(128)[:read], torch.zeros(128)[64:][:written]
    with pytest.raises(Exception, match=f"{message}.* 0 bytes behind a tensor of 252 bytes"):
        copy_kernel[(1,)](x, y, n, 64)
    copy_kernel[(1,)](x, torch.zeros(64), 63, 64)


@triton.jit
def describe_kernel(x, rows, columns, stride, N: tl.constexpr):
    matrix = tl.make_tensor_descriptor(x, [rows, columns], [stride, 1], [16, N])
    matrix.store([0, 0], matrix.load([0, 0]) + 1)


@pytest.mark.parametrize("first, rows, columns, stride, N", [
    (0, 16, 0, 16, 16), (0, 16, -8, 16, 16), (0, 0, 16, 16, 16), (1, 15, 16, 16, 16), (0, 16, 14, 14, 16),
    (0, 1, 8, 8, 512),
])  # fmt: skip
def test_a_matrix_that_the_copy_engine_does_not_take_is_seen(first, rows, columns, stride, N):
    x = torch.zeros(512)
    with pytest.raises(Exception, match="the copy engine takes no matrix"):
        describe_kernel[(1,)](x[first:], rows, columns, stride, N)
    describe_kernel[(1,)](x, 16, 16, 16, 16)
    assert x.sum() == 256


# ---------------------------------------------------------------- bfloat16

N = 2**16
EVERY = torch.arange(N, dtype=torch.int64)  # the bits of every bfloat16 number: infinities, NaNs, subnormals


def cast(x, dtype):
    y = torch.empty_like(x, dtype=dtype)
    copy_kernel[(1,)](x, y, x.numel(), x.numel())
    return y


def as_signed(bits, dtype):
    """Unsigned numbers as the signed ones of the same bits."""
    size = 8 * dtype.itemsize
    return (bits - (bits >= 2 ** (size - 1)) * 2**size).to(dtype)


@pytest.mark.parametrize(
    "bits",
    [
        torch.randint(0, 2**32, (N,), generator=h.rng("bits")),
        *(EVERY * N + N // 2 + near for near in (-1, 0, 1)),  # a tie after every bfloat16 number, and beside it
        EVERY * N,
    ],
    ids=["random", "below_ties", "ties", "above_ties", "exact"],
)
def test_float32_is_rounded_as_torch_rounds_it(bits):
    x = as_signed(bits, torch.int32).view(torch.float32)
    found, expected = cast(x, torch.bfloat16), x.bfloat16()
    assert torch.equal(found.isnan(), x.isnan())
    assert torch.equal(found.view(torch.int16)[~x.isnan()], expected.view(torch.int16)[~x.isnan()])


@pytest.mark.parametrize(
    "here, there",
    [(torch.bfloat16, t) for t in (torch.float32, torch.float16, torch.float64)] + [(torch.float16, torch.bfloat16)],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_other_casts_are_those_of_torch(here, there):
    x = as_signed(EVERY, torch.int16).view(here)
    torch.testing.assert_close(cast(x, there), x.to(there), rtol=0, atol=0, equal_nan=True)


@triton.jit
def product_kernel(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    b_a, b_b = tl.load(a + m * K + k[None, :]), tl.load(b + n * K + k[:, None])
    tl.store(c + m * N + n, tl.dot(b_a, b_b, tl.full([M, N], 1.0, tl.float32)))


def test_products_are_exact_and_added_up_in_float32():
    gen = h.rng("product")
    a, b, c = h.randn(gen, 32, 128).bfloat16(), h.randn(gen, 16, 128).bfloat16(), torch.empty(32, 16)
    product_kernel[(1,)](a, b, c, 32, 16, 128)
    assert h.relative_l2(c, a.double() @ b.double().T + 1, kind="parameter") < 1e-6


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def compute_kernel(x, y, N: tl.constexpr, WHAT: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(x + (N - 1 - i))
    if WHAT == "add":
        a = a + b
    elif WHAT == "subtract":
        a = a - b
    elif WHAT == "multiply":
        a = a * b
    elif WHAT == "negate":
        a = -a
    elif WHAT == "less":
        a = tl.where(a < b, a, b)
    elif WHAT == "equal":
        a = tl.where(a == b, a, b)
    elif WHAT == "fma":
        a = tl.fma(a, b, a)
    elif WHAT == "reduce":
        a = tl.where(i == 0, tl.reduce(a, 0, add), b)
    elif WHAT == "from_int":
        a = tl.where(i == 0, i.to(tl.bfloat16), b)
    elif WHAT == "from_float64":
        a = a.to(tl.float64).to(tl.bfloat16)
    elif WHAT == "choose":
        a = tl.where(i < 2, tl.abs(a), b)
    elif WHAT == "float32":
        a = (a.to(tl.float32) * b.to(tl.float32)).to(tl.bfloat16)
    tl.store(y + i, a)


ARITHMETIC = ("add", "subtract", "multiply", "negate", "less", "equal", "fma", "reduce")


@pytest.mark.parametrize("what", [*ARITHMETIC, "from_int", "from_float64"])
def test_arithmetic_on_the_bits_is_refused(what):
    x = torch.tensor([-1.0, 2, 3, -4]).bfloat16()
    with pytest.raises(Exception, match="the interpreter would take the bits of bfloat16 for integers"):
        compute_kernel[(1,)](x, x.clone(), 4, what)
    if what in ARITHMETIC:
        compute_kernel[(1,)](x.float(), x.float(), 4, what)


@pytest.mark.parametrize("what, expected", [
    ("choose", [1.0, 2, 2, -1]), ("float32", [4.0, 6, 6, 4]),
])  # fmt: skip
def test_what_is_right_is_not_refused(what, expected):
    x = torch.tensor([-1.0, 2, 3, -4]).bfloat16()
    y = torch.empty_like(x)
    compute_kernel[(1,)](x, y, 4, what)
    assert y.tolist() == expected
