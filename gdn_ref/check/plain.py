"""The recurrence and its gradient in NumPy, one head, in an order of additions that is the same on every machine.

Test vectors come from here: sums go term by term (no BLAS, whose order depends on the processor) and the exponential
is rounded from 40 decimal digits (a C library's may differ in the last bit). So their bytes are the same anywhere.
"""

from __future__ import annotations

import decimal
import functools
import math
import operator
from typing import NamedTuple

import numpy as np

DIGITS = decimal.Context(prec=40)
L2_EPS = 1e-6


class Forward(NamedTuple):
    """Outputs, the state before every token after its decay, what each token was off by, and the last state."""

    o: np.ndarray  # [T,V]
    decayed: list[np.ndarray]  # T times [K,V]
    errors: list[np.ndarray]  # T times [V]
    states: list[np.ndarray]  # T times [K,V], after the token
    state: np.ndarray  # [K,V]


class Gradients(NamedTuple):
    """The gradient of each input."""

    q: np.ndarray  # [T,K]
    k: np.ndarray  # [T,K]
    v: np.ndarray  # [T,V]
    g: np.ndarray  # [T]
    beta: np.ndarray  # [T]
    initial_state: np.ndarray  # [K,V]


def total(terms) -> np.ndarray:
    """The sum, first term first."""
    return functools.reduce(operator.add, terms)


def times(row: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """row [K] times matrix [K,V] -> [V]."""
    return total(row[i] * matrix[i] for i in range(len(row)))


def inner(a: np.ndarray, b: np.ndarray):
    """The sum of a * b over all entries."""
    return total(x for x in total(x for x in (a * b).reshape(len(a), -1)))


def exponential(x: float) -> float:
    """e^x for x <= 0, correctly rounded; 0 for -inf."""
    return 0.0 if math.isinf(x) else float(DIGITS.exp(decimal.Decimal(float(x))))


def log_decay(a: float, A_log: float, dt_bias: float) -> float:
    """-exp(A_log) softplus(a + dt_bias), correctly rounded."""
    x = DIGITS.add(decimal.Decimal(float(a)), decimal.Decimal(float(dt_bias)))
    softplus = DIGITS.ln(DIGITS.add(1, DIGITS.exp(x)))
    return -float(DIGITS.multiply(DIGITS.exp(decimal.Decimal(float(A_log))), softplus))


def sigmoid(b: float) -> float:
    """1 / (1 + e^-b), correctly rounded."""
    return float(DIGITS.divide(1, DIGITS.add(1, DIGITS.exp(decimal.Decimal(-float(b))))))


def l2norm(x: np.ndarray) -> np.ndarray:
    """x / sqrt(sum of x^2 + 1e-6) over the last axis."""
    return x / np.sqrt(total(x[..., i] * x[..., i] for i in range(x.shape[-1])) + L2_EPS)[..., None]


def forward(q, k, v, g, beta, state, scale) -> Forward:
    """Token by token (1.1); float64 arrays q, k [T,K], v [T,V], g, beta [T], state [K,V]."""
    outputs, decayed, errors, states = [], [], [], []
    for t in range(len(k)):
        decayed.append(exponential(g[t]) * state)
        errors.append(v[t] - times(k[t], decayed[t]))
        state = decayed[t] + k[t][:, None] * (beta[t] * errors[t])
        states.append(state)
        outputs.append(scale * times(q[t], state))
    return Forward(np.array(outputs).reshape(v.shape), decayed, errors, states, state)


def backward(q, k, beta, g, scale, run: Forward, do, dstate) -> Gradients:
    """Token by token from the last; do [T,V] and dstate [K,V] are the gradients of o and of the last state."""
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(do)
    dg, dbeta, d = np.zeros_like(g), np.zeros_like(beta), dstate  # d: the gradient of the state after token t
    for t in reversed(range(len(k))):
        d = d + (scale * q[t])[:, None] * do[t]
        y = times(k[t], d)  # [V] what a write is worth
        dq[t] = scale * times(do[t], run.states[t].T)
        dv[t], dbeta[t] = beta[t] * y, inner(y, run.errors[t])
        dk[t] = beta[t] * (times(run.errors[t], d.T) - times(y, run.decayed[t].T))
        d = d - k[t][:, None] * (beta[t] * y)
        dg[t] = inner(d, run.decayed[t])
        d = exponential(g[t]) * d
    return Gradients(dq, dk, dv, dg, dbeta, d)
