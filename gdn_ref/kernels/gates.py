"""Raw gates and the L2 norm inside kernels, in float32: the twins of gdn_ref/gates.py.

Only exp, log and rsqrt of Triton itself are used, whose errors are a few units in the last place of the result where
it matters here; there is no log1p, so that no vendor's library is needed.
"""

import triton
import triton.language as tl

L2_EPS = tl.constexpr(1e-6)
LARGEST_LOG_RATE = tl.constexpr(60.0)


@triton.jit
def log1p_exp(x):
    """log(1 + e^x) for x <= 0, to the last digit however small it is.

    log(1 + y) = 2 artanh(z) with z = y / (2 + y) <= 1/3, so eight terms of the series leave 1e-9.
    """
    y = tl.exp(x)
    z = y / (2 + y)
    w = z * z
    series = 1 / 11 + w * (1 / 13 + w * (1 / 15))
    series = 1 / 5 + w * (1 / 7 + w * (1 / 9 + w * series))
    return 2 * z * (1 + w * (1 / 3 + w * series))


@triton.jit
def log_decay(a, A_log, dt_bias):
    """g = -exp(A_log) softplus(a + dt_bias), never NaN and never positive (7.6)."""
    x = a + dt_bias
    softplus = tl.where(x > 0, x, 0.0) + log1p_exp(tl.where(x > 0, -x, x))
    # Joined as logarithms: e^100 * softplus(-200) would be inf * 0. Below -20 softplus is e^x to the last digit.
    rate = A_log + tl.where(x < -20, x, tl.log(softplus))
    return -tl.exp(tl.where(rate > LARGEST_LOG_RATE, LARGEST_LOG_RATE, rate))  # (7.6)


@triton.jit
def write_strength(b):
    """beta = sigmoid(b), kept in float32 up to its use: rounding it to bfloat16 costs 2e-3 in the state (7.6)."""
    return 1 / (1 + tl.exp(-b))  # (7.6)


@triton.jit
def inverse_norm(x):
    """1 / |x| of one row x [K], eps inside the root: what l2norm multiplies by (2.5). Columns beyond K must hold 0."""
    return tl.rsqrt(tl.sum(x * x, 0) + L2_EPS)  # (2.5)
