"""Chapter 12, from equation to Triton.  The forms that the kernels compute, which are not quite those of chapter 5.

The state is held transposed, [V, K], and beta stands on the right of the triangular inverse, as in (9.3).
"""

import math
from itertools import combinations

import numpy as np
import sympy as sp

from .. import exact
from .algebra import Identity, differ, entries, equal, holds, scalars, symbolic
from .ch05 import problems

C, = scalars("C", integer=True, positive=True)


def carried(A, p, S):
    """One chunk as the scan does it, from Sᵀ [V, K] and a matrix A [C, C] to (Oᵀ [V, C], Sᵀ [V, K])."""
    gamma, Gamma = exact.decay(p.alpha)
    P = Gamma * (p.q @ p.k.T) * p.beta[None, :]                # [C, C]
    U = S @ p.k.T                                              # [V, C]   what the keys read
    R = (p.v.T - gamma[None, :] * U) @ A.T                     # [V, C]   the errors
    O = gamma[None, :] * (S @ p.q.T) + R @ P.T                 # [V, C]
    return O, gamma[-1] * S + (R * (p.beta * Gamma[-1])[None, :]) @ p.k


def the_scan_s_three_lines():
    """Against the recurrence, on symbols and on Fractions with resets and β from 0 to 2."""
    for p in problems():
        right = exact.recurrence(*p)
        O, S = carried(exact.right_inverse(p.k, p.beta, exact.decay(p.alpha).Gamma), p, p.S0.T)
        equal(O.T, right.O, f"O, T={len(p.k)}")
        equal(S.T, right.S, f"S, T={len(p.k)}")


def beta_on_the_left_is_wrong():
    """A = (I + Γ⊙L)⁻¹ itself in the place of A_r.  Right as long as all β are the same; two tokens tell otherwise."""
    p = symbolic(2, 1, 1)
    same = p._replace(beta=p.beta[:1].repeat(2))
    for q in (same, p):
        A = exact.solve_tril(exact.chunk_scaled_dot_kkt_fwd(q.k, q.beta, exact.decay(q.alpha).Gamma))
        found, right = carried(A, q, q.S0.T)[1].T, exact.recurrence(*q).S
        if q is same:
            equal(found, right, "one β for all")
    return differ(found, right, "another β")


def norms_are_factors():
    """Keys and queries as they come, their lengths r and s in the rows and columns of what is small."""
    for p in problems():
        T = len(p.k)
        r, s = entries("r", T, positive=True), entries("s", T, positive=True)
        k, q = r[:, None] * p.k, s[:, None] * p.q
        gamma, Gamma = exact.decay(p.alpha)
        equal(Gamma * (k @ k.T), r[:, None] * (Gamma * r[None, :]) * (p.k @ p.k.T), f"Γ⊙KKᵀ, T={T}")
        equal(Gamma * (q @ k.T), s[:, None] * (Gamma * r[None, :]) * (p.q @ p.k.T), f"Γ⊙QKᵀ, T={T}")
        equal(gamma[:, None] * (k @ p.S0), (gamma * r)[:, None] * (p.k @ p.S0), f"diag(γ)KS, T={T}")
        equal((Gamma[-1][:, None] * k).T @ p.v, p.k.T @ ((Gamma[-1] * r)[:, None] * p.v), f"the write, T={T}")


def multiplications_of_the_inverse():
    """x_ij = −n_ij − Σ n_im x_mj over j < m < i: a product for each three tokens.  Summed, then counted for C = 64."""
    i, j = scalars("i j", integer=True, positive=True)
    total = sp.summation(sp.summation(i - j - 1, (j, 1, i - 1)), (i, 1, C))
    equal(total, C * (C - 1) * (C - 2) / 6, "summed over i and j")
    for size in (1, 2, 16, 64):
        counted = sum(1 for _ in combinations(range(size), 3))
        equal(counted, math.comb(size, 3), f"counted, C={size}")
        equal(total.subs(C, size), sp.Integer(counted), f"C={size}")


def slots_are_enough():
    """s = aC + r and L = bC + d: whole chunks drop out, and of the rests r, d < C every pair is tried."""
    a, b = scalars("a b", integer=True, nonnegative=True)
    r, d = scalars("r d", nonnegative=True)
    equal(sp.floor(sp.expand((a * C + r) / C)), a + sp.floor(r / C), "s/C")
    equal(sp.floor(sp.expand((a * C + r + b * C + d) / C)), a + b + sp.floor(r / C + d / C), "(s + L)/C")
    for size in (16, 32, 64):
        rest = np.arange(size)
        chunks, room = rest[None, :] > 0, 1 + (rest[:, None] + rest[None, :]) // size
        holds((chunks <= room).all(), f"no slot is given twice, C={size}")


IDENTITIES = [
    Identity("12.1", "Rᵀ = (Vᵀ − SᵀKᵀdiag(γ))A_rᵀ,  Oᵀ = SᵀQᵀdiag(γ) + RᵀPᵀ,  S_Cᵀ = γ_C Sᵀ + Rᵀdiag(βγ_C/γ)K,  "
             "P = (Γ⊙QKᵀ)diag(β)", the_scan_s_three_lines),
    Identity("12.2", "the same with A = (I + Γ⊙L)⁻¹, β on its left", beta_on_the_left_is_wrong, refuted=True),
    Identity("12.3", "keys diag(r)K, queries diag(s)Q: r and s are factors on Γ, γ and γ_C/γ", norms_are_factors),
    Identity("12.4", "(I + N)⁻¹ takes C(C−1)(C−2)/6 multiplications, one for each three tokens",
             multiplications_of_the_inverse),
    Identity("12.5", "a sequence of L tokens from token s, in slots from ⌊s/C⌋ + n on: ⌈L/C⌉ ≤ ⌊(s+L)/C⌋ + 1 − ⌊s/C⌋",
             slots_are_enough),
]
