"""Chapter 2, geometry of H = I − βkᵀk.  n stands for ‖k‖² = k kᵀ."""

import numpy as np
import sympy as sp

from .algebra import Identity, block_product, entries, equal, holds, identity, scalars, words

b, = scalars("β")
n, = scalars("n", positive=True)
k, kT, x = words("k kᵀ x")

H = 1 - b * kT * k


def householder(keys, beta):
    """H with SymPy entries, [K, K], for keys [K]."""
    return identity(len(keys)) - beta * np.outer(keys, keys)


def determinant():
    """Any size: one block matrix factored in two ways, each a product of triangular ones.  Then entries, K = 1 to 4.

    [[I, kᵀ], [βk, 1]]  =  [[I, 0], [βk, 1]] [[I, kᵀ], [0, 1 − βkkᵀ]]  =  [[I, kᵀ], [0, 1]] [[H, 0], [βk, 1]].
    The determinants of the two right-hand sides are 1 − β‖k‖² and det H.
    """
    block = [[sp.S.One, kT], [b * k, sp.S.One]]
    equal(block_product([[1, 0], [b * k, 1]], [[1, kT], [0, 1 - b * k * kT]]), block, "lower · upper")
    equal(block_product([[1, kT], [0, 1]], [[H, 0], [b * k, 1]]), block, "upper · lower")
    for K in range(1, 5):
        keys = entries("k", K)
        equal(sp.Matrix(householder(keys, b)).det(method="berkowitz"), 1 - b * (keys @ keys), f"K={K}")


def eigenvector():
    """Any size by words: k kᵀ is 1×1 and may stand to the left of k."""
    equal(k * H, (1 - b * k * kT) * k)


def reflection():
    """Any size by words, then with the quotient in the entries, K = 3."""
    square = sp.expand(H * H).subs(k * kT, n)
    equal(square.subs(b, 2 / n), sp.S.One)
    keys = entries("k", 3, positive=True)
    R = householder(keys, 2 / (keys @ keys))
    equal(R @ R, identity(3), "K=3")


def orthogonal_rows_stay():
    """Any size by words, x kᵀ = 0; then a general row made orthogonal to k, K = 3."""
    equal(sp.expand(x * H).subs(x * kT, 0), x)
    keys, y = entries("k", 3, positive=True), entries("y", 3)
    y = y - (y @ keys) / (keys @ keys) * keys
    equal(y @ householder(keys, b), y, "K=3")


def l2norm():
    """With the domain s = Σx² ≥ 0, ε > 0, β ≥ 0."""
    s, beta = scalars("s β", nonnegative=True)
    eps, = scalars("ε", positive=True)
    row = entries("x", 3)
    unit = row / sp.sqrt(row @ row + eps)
    square = s / (s + eps)
    equal((unit @ unit), square.subs(s, row @ row), "‖x̂‖², K=3")
    equal(1 - square, eps / (s + eps), "1 − ‖x̂‖²")
    holds((eps / (s + eps)).is_positive, "‖x̂‖ < 1")
    holds((beta * eps / (s + eps)).is_nonnegative, "β‖x̂‖² ≤ β")
    equal(sp.limit(square, s, sp.oo), sp.S.One, "the limit of large x")


IDENTITIES = [
    Identity("2.1", "det(I − βkᵀk) = 1 − β‖k‖²", determinant),
    Identity("2.2", "kH = (1 − β‖k‖²)k", eigenvector),
    Identity("2.3", "β = 2/‖k‖²  ⇒  H² = I", reflection),
    Identity("2.4", "x ⊥ k  ⇒  xH = x", orthogonal_rows_stay),
    Identity("2.5", "x̂ = x·rsqrt(Σx² + ε)  ⇒  ‖x̂‖ < 1, ‖x̂‖ → 1 and β‖x̂‖² ≤ β", l2norm),
]
