"""Raw gates and the L2 norm: what turns a layer's projections into the inputs of the recurrence.

Book: chapter 2 for the norm (2.5), chapter 7 for the gates (7.6).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

L2_EPS = 1e-6
LARGEST_LOG_RATE = 60.0


def l2norm(x: Tensor) -> Tensor:
    """Scale every vector of the last axis to a length just below 1 (2.5).

    x: [..., K], any floating dtype. Returns the same shape and dtype; the sum is taken in float32 or wider.
    eps = 1e-6 stands inside the root, as in flash-linear-attention and transformers, in every path of this package.
    A row of zeros stays zero and has a finite gradient.
    """
    check_floating("x", x, "[..., K]")
    wide = x.to(at_least_float32(x.dtype))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPS)).to(x.dtype)  # (2.5)


def check_floating(name: str, x, axes: str) -> None:
    """x is a tensor of floating-point numbers."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}: found {found}, expected a floating-point tensor {axes}")


def l2norm_backward(x: Tensor, dy: Tensor) -> Tensor:
    """The gradient of x, in its dtype, from dy, that of l2norm(x): what of dy is across y, made longer (8.14)."""
    wide = x.to(at_least_float32(x.dtype, dy.dtype))
    r = torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPS)
    y = r * wide
    return (r * (dy - y * (y * dy).sum(-1, keepdim=True))).to(x.dtype)  # (8.14)


def raw_gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both gates of the layer from their raw projections (7.6).

    a, b: [..., HV]; A_log, dt_bias: [HV]. Returns g (natural-log decay, g <= 0) and beta (in [0, 1]), both [..., HV],
    in float32 (float64 if an input is).
    """
    return log_decay(a, A_log, dt_bias), write_strength(b)


def log_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor | None = None) -> Tensor:
    """g = -exp(A_log) * softplus(a + dt_bias), never NaN and never positive (7.6).

    a: [..., HV]; A_log, dt_bias: [HV]. Returns the natural-log decay [..., HV] in float32 (float64 if an input is).
    """
    dtype = at_least_float32(a.dtype, A_log.dtype)
    x = a.to(dtype) if dt_bias is None else a.to(dtype) + dt_bias.to(dtype)
    # Joined as logarithms: exp(100) * softplus(-200) would be inf * 0. It stops growing far beyond a decay of 0.
    return -(A_log.to(dtype) + log_softplus(x)).clamp(max=LARGEST_LOG_RATE).exp()  # (7.6)


def log_decay_backward(
    a: Tensor, A_log: Tensor, dt_bias: Tensor | None, dg: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of a, A_log and dt_bias, in their dtypes, from dg [..., HV], that of log_decay (8.13)."""
    dtype = at_least_float32(a.dtype, A_log.dtype)
    x = a.to(dtype) if dt_bias is None else a.to(dtype) + dt_bias.to(dtype)
    rate = A_log.to(dtype)
    dg = torch.where(rate + log_softplus(x) <= LARGEST_LOG_RATE, dg, 0)
    da = -dg * (rate + F.logsigmoid(x)).exp()  # (8.13)
    dA_log = (dg * log_decay(a, A_log, dt_bias)).flatten(0, -2).sum(0)  # (8.13)
    ddt_bias = None if dt_bias is None else da.flatten(0, -2).sum(0).to(dt_bias.dtype)
    return da.to(a.dtype), dA_log.to(A_log.dtype), ddt_bias


def log_softplus(x: Tensor) -> Tensor:
    """log(log(1 + e^x)) without underflow: below -20 it is x - e^x / 2 to the last digit. Same shape and dtype."""
    far = x.clamp(max=-20)
    # -logsigmoid(-x) is softplus(x) without the switch to a straight line that F.softplus makes at 20.
    return torch.where(x < -20, far - far.exp() / 2, (-F.logsigmoid(-x.clamp(min=-20))).log())


def write_strength(b: Tensor, allow_neg_eigval: bool = False) -> Tensor:
    """beta = sigmoid(b), or 2 * sigmoid(b) where negative eigenvalues of I - beta k^T k are wanted (7.6), (2.2).

    b: [..., HV]. Returns [..., HV] in float32 (float64 for float64): rounding beta to bfloat16 costs 2e-3 in the state.
    """
    beta = torch.sigmoid(b.to(at_least_float32(b.dtype)))  # (7.6)
    return 2 * beta if allow_neg_eigval else beta


def write_strength_backward(b: Tensor, dbeta: Tensor, allow_neg_eigval: bool = False) -> Tensor:
    """The gradient of b, in its dtype, from dbeta, that of write_strength (8.13)."""
    beta = torch.sigmoid(b.to(at_least_float32(b.dtype)))
    return ((2 if allow_neg_eigval else 1) * dbeta * beta * (1 - beta)).to(b.dtype)  # (8.13)


def at_least_float32(*dtypes: torch.dtype) -> torch.dtype:
    """float64 if one of the dtypes is float64, else float32: the dtype that gates, decays and states are kept in."""
    return torch.float64 if torch.float64 in dtypes else torch.float32
