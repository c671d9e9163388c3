"""Chapter 3, WY.  P_r = H_r ⋯ H_1 is a product; I − KᵀW is a sum.  No gate yet: α = 1.

In words k is the new key and K, W are all the rows before it, as many as there may be.  A row appended below each gives
KᵀW + kᵀw, so one induction step is the proof for every chunk length and every width.
"""

import numpy as np
import sympy as sp

from .. import exact
from .algebra import Identity, differ, entries, equal, identity, rational, scalars, symbolic, words

b, = scalars("β")
k, kT, v, K, KT, W, WT, X, Y = words("k kᵀ v K Kᵀ W Wᵀ X Y")

H = 1 - b * kT * k


def problems():
    """Small ones with a symbol for every entry, bigger ones with Fractions; α = 1."""
    return [p.ungated() for p in (symbolic(2, 2, 1), symbolic(3, 2, 1), rational(5, 3, 2), rational(12, 4, 3))]


def product_of_householders(keys, beta):
    """P_C = H_C ⋯ H_1, [K, K]; the unit matrix for no keys."""
    P = identity(keys.shape[1])
    for t in range(len(keys)):
        P = (identity(len(P)) - beta[t] * np.outer(keys[t], keys[t])) @ P
    return P


def lower(keys, beta):
    """L = tril(diag(β) K Kᵀ, −1), [C, C]."""
    return np.tril(beta[:, None] * (keys @ keys.T), -1)


def step_of_the_product():
    """Any size by words."""
    equal(H * (1 - X), 1 - X - kT * b * (k - k * X))


def step_of_the_memory():
    """Any size by words."""
    equal(H * Y + b * kT * v, Y + kT * b * (v - k * Y))


def product_is_a_sum():
    """The base P_0 = I and the step in words; then ``exact.wy_recursion`` and ``exact.wy_solve`` themselves."""
    w = b * (k - k * KT * W)
    equal(H * (1 - KT * W), 1 - (KT * W + kT * w), "induction step")
    for p in problems():
        for wy in (exact.wy_recursion, exact.wy_solve):
            factors = wy(p.k, p.v, p.alpha, p.beta)
            C, width = p.k.shape
            equal(identity(width) - p.k.T @ factors.W, product_of_householders(p.k, p.beta), f"{wy.__name__}, C={C}")


def right_recursion():
    """The row that (3.1) appends, with X = KᵀW; and every row of ``exact.wy_recursion``, read from the product."""
    equal(b * (k - k * (KT * W)), b * k - b * (k * KT) * W)
    for p in problems():
        rows = exact.wy_recursion(p.k, p.v, p.alpha, p.beta).W
        for i in range(len(rows)):
            before = product_of_householders(p.k[:i], p.beta[:i])
            equal(rows[i], p.beta[i] * (p.k[i] @ before), f"C={len(rows)}, row {i}")


def triangular_system():
    """Row i of the system is (3.4) with its sum moved to the left."""
    w, = words("w")
    equal((w + b * (k * KT) * W).subs(w, b * k - b * (k * KT) * W), b * k, "one row, any size")
    for p in problems():
        for wy in (exact.wy_recursion, exact.wy_solve):
            factors = wy(p.k, p.v, p.alpha, p.beta)
            L, C = lower(p.k, p.beta), len(p.k)
            equal((identity(C) + L) @ factors.W, p.beta[:, None] * p.k, f"{wy.__name__}, C={C}")


def swapped_recursion(keys, beta):
    """W [C, K] by the seed's formula, its tokens written as rows: w_i = β_i k_i − β_i (k_i W_{<i}ᵀ) K_{<i}."""
    rows = np.zeros_like(keys)
    for i in range(len(keys)):
        rows[i] = beta[i] * (keys[i] - (keys[i] @ rows[:i].T) @ keys[:i])
    return rows


def swapped_is_wrong():
    """Equal at C = 1, 2, because the product so far, I or H_1, is symmetric.  From C = 3 on it is not.

    With R = I − KᵀW so far, a right step gives R − βkᵀkR and a swapped one R − βkᵀkRᵀ: the new key meets the product
    so far in reverse order.  At C = 3: H_2 H_1 − β_3 k_3ᵀk_3 H_1 H_2, neither H_3 H_2 H_1 nor H_1 H_2 H_3.

    The residual for any size is written as the seed writes: a token is a column, K, W [width, tokens], the product
    grows on the right, P = I − W Kᵀ.  The seed's new column is βk − K(Wᵀβk).
    """
    P = 1 - W * KT
    column = b * k - K * (WT * b * k)
    left_over = P * (1 - b * k * kT) - (P - column * kT)
    equal(left_over, b * (W * KT - K * WT) * k * kT, "residual, any size")
    R, transposed = 1 - KT * W, 1 - WT * K
    equal(1 - (KT * W + kT * b * (k - k * WT * K)), R - b * kT * k * transposed, "a swapped step, any size")
    for C in (1, 2):
        keys, beta = entries("k", C, 2), entries("β", C)
        equal(identity(2) - keys.T @ swapped_recursion(keys, beta), product_of_householders(keys, beta), f"C={C}")
    keys, beta = entries("k", 3, 2), entries("β", 3)
    swapped = identity(2) - keys.T @ swapped_recursion(keys, beta)
    forth, back = (product_of_householders(keys[i], beta[i]) for i in ([0, 1], [1, 0]))
    equal(swapped, forth - beta[2] * np.outer(keys[2], keys[2]) @ back, "C=3, what it is instead")
    for order in ([0, 1, 2], [2, 1, 0]):
        differ(swapped, product_of_householders(keys[order], beta[order]), f"C=3, order {order}")
    differ(left_over, sp.S.Zero)
    return "β·(W·Kᵀ − K·Wᵀ)·k·kᵀ"


IDENTITIES = [
    Identity("3.1", "H(I − X) = I − X − kᵀβ(k − kX)", step_of_the_product),
    Identity("3.2", "HY + βkᵀv = Y + kᵀβ(v − kY)", step_of_the_memory),
    Identity("3.3", "P_C = H_C ⋯ H_1 = I − KᵀW", product_is_a_sum),
    Identity("3.4", "w_i = β_i k_i − β_i (k_i K_{<i}ᵀ) W_{<i}", right_recursion),
    Identity("3.5", "(I + L)W = diag(β)K  with L = tril(diag(β)KKᵀ, −1)", triangular_system),
    Identity("3.6", "w_i = β_i k_i − K_{<i}(W_{<i}ᵀ β_i k_i)  (a token a column; factors swapped)", swapped_is_wrong,
             refuted=True),
]
