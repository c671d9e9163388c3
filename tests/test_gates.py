"""Raw gates and the L2 norm: values against float64, the ends of their range, gradients."""

import pytest
import torch
from helpers import FP32_BOUND, gates, l2norm, rand, randn, rng, unit

import gdn_ref
from gdn_ref.gates import raw_gates, write_strength


def raw(T=50, HV=3, spread=2.0, dtype=torch.float32):
    gen = rng("raw", T, HV, spread)
    a, b = spread * randn(gen, 1, T, HV), randn(gen, 1, T, HV)
    A_log, dt_bias = torch.log(1.0 + 15.0 * rand(gen, HV)), randn(gen, HV)
    return [x.to(dtype) for x in (a, b, A_log, dt_bias)]


def norm_error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("allow", [False, True], ids=["beta-below-1", "beta-below-2"])
@pytest.mark.parametrize("spread", [0.1, 2.0, 30.0])
def test_raw_gates_equal_their_formula(spread, allow):
    inputs = raw(spread=spread)
    g, beta = raw_gates(*inputs)
    beta = write_strength(inputs[1], allow_neg_eigval=True) if allow else beta
    g_ref, beta_ref = gates(*inputs, factor=2.0 if allow else 1.0)
    assert g.dtype == beta.dtype == torch.float32
    assert g.shape == beta.shape == inputs[0].shape
    assert norm_error(g, g_ref) < 1e-6 and norm_error(beta, beta_ref) < 1e-6
    normal = g_ref.abs() > torch.finfo(torch.float32).tiny
    relative = ((g.double() - g_ref) / g_ref)[normal].abs().max()  # each entry: slow heads must not hide behind fast
    assert relative < 1e-5


def test_raw_gates_keep_float64():
    inputs = raw(dtype=torch.float64)
    g, beta = raw_gates(*inputs)
    g_ref, beta_ref = gates(*inputs)
    assert g.dtype == beta.dtype == torch.float64
    assert norm_error(g, g_ref) < 1e-14 and norm_error(beta, beta_ref) < 1e-14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_raw_gates_of_half_inputs_are_float32(dtype):
    a, b, A_log, dt_bias = raw()
    a, b = a.to(dtype), b.to(dtype)
    g, beta = raw_gates(a, b, A_log, dt_bias)
    g_ref, beta_ref = gates(a, b, A_log, dt_bias)
    assert g.dtype == beta.dtype == torch.float32
    assert norm_error(g, g_ref) < 1e-6 and norm_error(beta, beta_ref) < 1e-6
    assert norm_error(beta.to(dtype), beta_ref) > 1e-5  # a rounded sigmoid would be seen


def test_raw_gates_gradcheck():
    inputs = [x.requires_grad_() for x in raw(T=4, HV=2, spread=1.0, dtype=torch.float64)]
    assert torch.autograd.gradcheck(raw_gates, inputs)
    assert torch.autograd.gradgradcheck(raw_gates, inputs)


def test_raw_gates_broadcast_over_any_leading_axes():
    a, b, A_log, dt_bias = raw()
    g, beta = raw_gates(a, b, A_log, dt_bias)
    flat_g, flat_beta = raw_gates(a[0], b[0], A_log, dt_bias)
    assert torch.equal(g[0], flat_g) and torch.equal(beta[0], flat_beta)


@pytest.mark.parametrize(
    "A_log, a, alpha",
    [
        (100.0, -200.0, 1.0),
        (100.0, 0.0, 0.0),
        (-100.0, 0.0, 1.0),
        (0.0, 1e30, 0.0),
        (0.0, -1e30, 1.0),
        (88.0, 1e30, 0.0),
    ],
)
def test_raw_gates_at_the_ends_of_the_range(A_log, a, alpha):
    inputs = [torch.tensor([x]).requires_grad_() for x in (a, 0.0, A_log, 0.0)]
    g, _ = raw_gates(*inputs)
    assert not g.isnan() and g <= 0 and g.exp() == alpha
    (g.exp()).sum().backward()
    assert all(x.grad is None or not x.grad.isnan().any() for x in inputs)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("size", [1e-20, 1e-4, 1.0, 1e4])
def test_l2norm_has_eps_inside_the_root(size, dtype, bound):
    x = (size * randn(rng("l2"), 3, 5, 7)).to(dtype)
    y = gdn_ref.l2norm(x)
    assert y.dtype == dtype
    assert norm_error(y, l2norm(x)) < bound


def test_l2norm_of_large_and_zero_rows():
    x = torch.stack([torch.zeros(8), torch.full((8,), 3.0)]).double().requires_grad_()
    y = gdn_ref.l2norm(x)
    y.sum().backward()
    assert not y[0].any()
    assert x.grad.isfinite().all() and x.grad[0].abs().max() <= 1001  # 1/sqrt(eps): modest
    assert 1 - 1e-6 < y[1].norm() < 1  # so that beta |k|^2 stays below beta


def test_l2norm_sums_half_inputs_in_float32():
    x = unit(randn(rng("l2h"), 4, 256)).to(torch.bfloat16)
    y = gdn_ref.l2norm(x)
    assert norm_error(y, l2norm(x)) < (4e-3 if y.dtype == torch.bfloat16 else FP32_BOUND)


def test_l2norm_gradcheck():
    x = randn(rng("l2g"), 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(gdn_ref.l2norm, x)
    assert torch.autograd.gradgradcheck(gdn_ref.l2norm, x)


def test_the_norm_of_whole_numbers_is_refused():
    with pytest.raises(TypeError, match=r"^x: found torch\.int64, expected a floating-point tensor"):
        gdn_ref.l2norm(torch.ones(2, 3, dtype=torch.int64))
