"""Chapter 6, inverting I + L, L strictly lower triangular [C, C]."""

import math

import numpy as np
import sympy as sp

from .. import exact
from .algebra import (
    Identity,
    block_product,
    entries,
    equal,
    holds,
    identity,
    rational,
    scalars,
    strictly_lower,
    words,
)

L, = words("L")


def power(matrix, p):
    """matrix^p by repeated products."""
    result = identity(len(matrix))
    for _ in range(p):
        result = result @ matrix
    return result


def ones_below(C):
    """L for a unit key that repeats, β = 1: ones below the diagonal, [C, C]."""
    return np.tril(np.ones((C, C), dtype=object), -1)


def nilpotent():
    """Each product moves the first diagonal that can be non-zero one further down: p of them leave i − j ≥ p."""
    for C in range(1, 6):
        equal(power(strictly_lower("L", C), C), 0 * identity(C), f"general L, C={C}")
    C = 20
    distance = np.subtract.outer(np.arange(C), np.arange(C))
    for p in range(1, C + 1):
        equal((power(ones_below(C), p) != 0).astype(int), (distance >= p).astype(int), f"L^{p}, C={C}")


def alternating_sum(X, n):
    """Σ_{j<n} (−X)^j in words."""
    return sum((-X) ** j for j in range(n))


def neumann_sum():
    """The sum telescopes for any size, and (6.1) removes the remainder; then the general L, C = 4."""
    for n in range(1, 10):
        equal((1 + L) * alternating_sum(L, n), 1 - (-L) ** n, f"n={n}")
    N = strictly_lower("L", 4)
    equal(sum(power(-N, j) for j in range(4)), exact.solve_tril(N), "general L, C=4")


def forward_substitution():
    """The code on the general L and right-hand side, C = 4; on Fractions, C = 12; on integers, which stay integers."""
    N, R = strictly_lower("L", 4), entries("R", 4, 2)
    equal((identity(4) + N) @ exact.forward_substitution(N, R), R, "general L, C=4")
    p = rational(12, 4, 3)
    N = np.tril(p.k @ p.k.T, -1)
    equal((identity(12) + N) @ exact.forward_substitution(N, p.v), p.v, "Fractions, C=12")
    whole = exact.solve_tril(np.tril(np.arange(36).reshape(6, 6).astype(object), -1))
    holds(all(type(x) is int for x in whole.ravel()), "no division: integers in, integers out")


def block_inverse():
    """Blocks of any size: multiplied from both sides."""
    A, B, D = words("A B D")
    matrix, inverse = [[A, 0], [B, D]], [[1 / A, 0], [-(1 / D) * B * (1 / A), 1 / D]]
    unit = [[sp.S.One, 0], [0, sp.S.One]]
    equal(block_product(matrix, inverse), unit, "from the right")
    equal(block_product(inverse, matrix), unit, "from the left")


def doubling_product():
    """The factors multiply out to the sum (6.2), to any length: with R the remainder, (1 − R)(1 + R) = 1 − R²."""
    R, = words("R")
    equal((1 - R) * (1 + R), 1 - R * R, "one doubling, any size")
    product, n = 1 - L, 2
    while n <= 64:
        equal(product, alternating_sum(L, n), f"C={n}")
        product, n = sp.expand(product * (1 + L ** n)), 2 * n
    N = strictly_lower("L", 4)
    equal((identity(4) - N) @ (identity(4) + N @ N), exact.solve_tril(N), "general L, C=4")


def repeated_keys_powers():
    """Row i of L·X is the sum of the rows of X above it, so going from p to p + 1 sums a column of Pascal's triangle.

    The step is Pascal's rule, for any n and p; the whole claim is then checked for C = 64, every power.
    """
    n, p = scalars("n p", integer=True, positive=True)
    unit = sp.binomial(n, p - 1)
    grow = sp.combsimp((sp.binomial(n + 1, p) / unit).rewrite(sp.gamma))
    stay = sp.combsimp((sp.binomial(n, p) / unit).rewrite(sp.gamma))
    equal(grow - stay, sp.S.One, "Pascal's rule")
    C = 64
    found = ones_below(C)
    for p in range(1, C + 1):
        wanted = [[math.comb(i - j - 1, p - 1) if i > j else 0 for j in range(C)] for i in range(C)]
        equal(found, wanted, f"L^{p}, C={C}")
        found = np.vstack([0 * found[:1], np.cumsum(found, axis=0)[:-1]])
    holds(4 * 10 ** 17 < max(math.comb(62, p) for p in range(63)) < 10 ** 18, "the largest entry is near 1e18")


def repeated_keys_inverse():
    """With Z one step down, I + L = I + Z + Z² + …, so the inverse is I − Z.  Then the code: whatever α, o_t = v_t."""
    Z, = words("Z")
    equal((1 - Z) * sum(Z ** j for j in range(9)), 1 - Z ** 9, "telescopes")
    for C in (1, 2, 5, 64):
        equal(exact.solve_tril(ones_below(C)), identity(C) - np.eye(C, k=-1, dtype=object), f"C={C}")
    T, key = 5, np.array([sp.Rational(3, 5), sp.Rational(4, 5)], dtype=object)
    keys, v, alpha = np.tile(key, (T, 1)), entries("v", T, 2), entries("α", T)
    one = np.ones(T, dtype=object)
    equal(exact.chunk(keys, keys, v, one, one).O, v, "chunk")
    equal(exact.recurrence(keys, keys, v, alpha, one).O, v, "recurrence, any α")


def level_mask(C, size):
    """True where a row of an odd block of ``size`` meets a column of the even block before it, [C, C]."""
    i, j = np.indices((C, C)) // size
    return (i == j + 1) & (i % 2 == 1)


def block_doubling():
    """One level for blocks of any size; then every level, C = 16, Fractions."""
    A, B, D = words("A B D")
    X, N = [[1 / A, 0], [0, 1 / D]], [[0, 0], [B, 0]]
    correction = block_product(X, block_product(N, X))
    inverse = [[1 / A, 0], [-(1 / D) * B * (1 / A), 1 / D]]
    equal([[X[i][j] - correction[i][j] for j in range(2)] for i in range(2)], inverse, "one level, any size")
    p, X, size = rational(16, 3, 1), identity(16), 1
    N = exact.chunk_scaled_dot_kkt_fwd(p.k, p.beta, exact.decay(p.alpha).Gamma)
    while size < 16:
        X, size = X - X @ (N * level_mask(16, size)) @ X, 2 * size
    equal(X, exact.solve_tril(N), "every level, C=16")


IDENTITIES = [
    Identity("6.1", "L^C = 0", nilpotent),
    Identity("6.2", "(I + L)⁻¹ = Σ_{j<C} (−L)^j", neumann_sum),
    Identity("6.3", "(I + L)X = R  ⇔  x_i = r_i − Σ_{j<i} L_ij x_j, without a division", forward_substitution),
    Identity("6.4", "[[A, 0], [B, D]]⁻¹ = [[A⁻¹, 0], [−D⁻¹BA⁻¹, D⁻¹]]", block_inverse),
    Identity("6.5", "(I + L)⁻¹ = (I − L)(I + L²)(I + L⁴)…", doubling_product),
    Identity("6.6", "repeated unit key, β = 1: (L^p)_ij = binomial(i−j−1, p−1)", repeated_keys_powers),
    Identity("6.7", "repeated unit key, β = 1, q = k: (I + L)⁻¹ is bidiagonal, hence o_t = v_t", repeated_keys_inverse),
    Identity("6.8", "block doubling: X ← X − X N_level X", block_doubling),
]
