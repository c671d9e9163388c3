"""Chapter 5, the gate is a diagonal similarity.

In words a is this token's α, c the decay γ_{t−1} before it, D = diag(γ_{t−1}/γ_j) over the rows before it.  So the new
row of Γ is αD and the new γ is αc.
"""

import numpy as np
import sympy as sp

from .. import exact
from .algebra import Identity, differ, entries, equal, identity, rational, scalars, strictly_lower, symbolic, words
from .ch03 import lower
from .ch04 import states

a, c = scalars("α γ", positive=True)
b, = scalars("β")
k, kT, v, q, KT, W, U, S0, S, D, E = words("k kᵀ v q Kᵀ W U S₀ S D E")

STATE = c * S0 + KT * D * E                           # S_{t−1}, by (5.6)
DELTA = b * (v - a * k * STATE)                       # what the token writes, by (5.4)


def problems():
    """Small ones with a symbol for every entry, bigger ones with Fractions, there with α = 0 among them."""
    return [symbolic(2, 2, 1), symbolic(3, 2, 1), rational(5, 3, 2), rational(12, 4, 3)]


def positive_problems():
    """The same without α = 0, so that γ may be divided by."""
    return [symbolic(2, 2, 1), symbolic(3, 1, 1), rational(5, 3, 2, resets=False), rational(12, 4, 3, resets=False)]


def similar(p, matrix):
    """diag(γ) M diag(γ)⁻¹, [C, C]."""
    gamma = exact.decay(p.alpha).gamma
    return gamma[:, None] * matrix / gamma[None, :]


def scaled_state_is_ungated():
    """One step for any size, γ_t = αγ_{t−1}; then whole runs of ``exact.recurrence``."""
    H = 1 - b * kT * k
    gated = a * H * S + b * kT * v
    equal(gated / (a * c), H * (S / c) + b * kT * (v / (a * c)), "one step, any size")
    for p in positive_problems():
        gamma = exact.decay(p.alpha).gamma
        scaled = p.ungated()._replace(v=p.v / gamma[:, None])
        equal(exact.recurrence(*p).S / gamma[-1], exact.recurrence(*scaled).S, f"C={len(p.k)}")


def one_inverse_for_both():
    """Any size by words, with I + L = M and Γ⊙L = DLD⁻¹, D = diag(γ).

    Then entries: Γ_ij = γ_i/γ_j is where α > 0 is needed.  First the general strictly lower L, C = 4, not only the one
    made of keys; then with keys, and Fractions.
    """
    D, M = words("D M")
    equal((1 + D * (M - 1) / D) * (D / M / D), sp.S.One, "any size")
    L, alpha = strictly_lower("L", 4), entries("α", 4, positive=True)
    gamma, Gamma = exact.decay(alpha)
    T = exact.solve_tril(L)
    A = gamma[:, None] * T / gamma[None, :]
    equal((identity(4) + Gamma * L) @ A, identity(4), "general L, C=4")
    for p in positive_problems():
        N = exact.chunk_scaled_dot_kkt_fwd(p.k, p.beta, exact.decay(p.alpha).Gamma)
        equal(similar(p, exact.solve_tril(lower(p.k, p.beta))), exact.solve_tril(N), f"C={len(p.k)}")


def factors_share_the_inverse():
    """By (5.1) the gated factors are diag(γ) times the ungated ones for values v/γ; and the code's two ways agree.

    In words D = diag(γ), B = diag(β), M = I + L; diagonal matrices commute, DB = BD.
    """
    D, M, B, K, V = words("D M B K V")
    A = D / M / D
    equal(A * (D * B) * K, D * ((1 / M) * B * K), "W, any size")
    equal(A * B * V, D * ((1 / M) * ((1 / D) * B * V)), "U, any size")
    for p in positive_problems():
        gamma, plain = exact.decay(p.alpha).gamma, p.ungated()
        ungated = exact.wy_recursion(plain.k, plain.v / gamma[:, None], plain.alpha, plain.beta)
        gated = exact.wy_solve(p.k, p.v, p.alpha, p.beta)
        equal(gated.W, gamma[:, None] * ungated.W, f"W, C={len(p.k)}")
        equal(gated.U, gamma[:, None] * ungated.U, f"U, C={len(p.k)}")
    for p in problems():
        one, other = (wy(p.k, p.v, p.alpha, p.beta) for wy in (exact.wy_recursion, exact.wy_solve))
        equal(one.W, other.W, f"recursion and solve, W, C={len(p.k)}")
        equal(one.U, other.U, f"recursion and solve, U, C={len(p.k)}")


def e_is_the_delta():
    """One row for any size, with E = U − W S_0 above it; then the code against the states of the recurrence."""
    u, w = b * (v - a * k * KT * D * U), b * (a * c * k - a * k * KT * D * W)
    equal(u - w * S0, DELTA.subs(E, U - W * S0), "one row, any size")
    for p in problems():
        S_ = states(p)
        deltas = np.array([p.beta[t] * (p.v[t] - p.alpha[t] * (p.k[t] @ S_[t])) for t in range(len(p.k))])
        for wy in (exact.wy_recursion, exact.wy_solve):
            found = exact.chunk_delta(wy(p.k, p.v, p.alpha, p.beta), p.S0)
            equal(found, deltas, f"{wy.__name__}, C={len(p.k)}")


def outputs_of_a_chunk():
    """One row for any size, then the code."""
    new_state = a * STATE + kT * DELTA
    equal(q * new_state, a * c * q * S0 + (q * KT) * (a * D) * E + (q * kT) * DELTA, "one row, any size")
    for p in problems():
        equal(exact.chunk(*p).O, exact.recurrence(*p).O, f"C={len(p.k)}")


def state_after_a_chunk():
    """The step from t − 1 to t for any size (before the first token both sides are S_0), then the code."""
    gated = a * (1 - b * kT * k) * STATE + b * kT * v
    equal(gated, a * c * S0 + KT * (a * D) * E + kT * DELTA, "induction step")
    for p in problems():
        equal(exact.chunk(*p).S, exact.recurrence(*p).S, f"C={len(p.k)}")


def output_with_mask(p, mask):
    """(5.5) with any mask [C, C] in the place of Γ."""
    gamma, Gamma = exact.decay(p.alpha)
    E_ = exact.chunk_delta(exact.wy_solve(p.k, p.v, p.alpha, p.beta), p.S0)
    return exact.chunk_output(p.q, p.k, gamma, mask(Gamma), E_, p.S0)


def mask_m_is_wrong():
    """M is the triangle of ones.  Right without decay, wrong with it, from the second token on."""
    def ones(Gamma):
        return np.tril(np.ones_like(Gamma))

    plain, p = symbolic(2, 2, 1).ungated(), symbolic(2, 1, 1)
    equal(output_with_mask(plain, ones), exact.recurrence(*plain).O, "α = 1")
    equal(output_with_mask(p, ones)[0], exact.recurrence(*p).O[0], "first token")
    return differ(output_with_mask(p, ones), exact.recurrence(*p).O)


def factors_with_undecayed_keys(p):
    """(5.3) with (I + L)⁻¹ in the place of A."""
    return exact.recompute_w_u_fwd(p.k, p.v, p.beta, exact.solve_tril(lower(p.k, p.beta)), exact.decay(p.alpha).gamma)


def undecayed_keys_are_wrong():
    """Right without decay, wrong with it, from the second token on."""
    plain, p = symbolic(2, 2, 1).ungated(), symbolic(2, 1, 1)
    same = exact.wy_recursion(plain.k, plain.v, plain.alpha, plain.beta)
    equal(factors_with_undecayed_keys(plain).U, same.U, "α = 1")
    right = exact.wy_recursion(p.k, p.v, p.alpha, p.beta)
    differ(factors_with_undecayed_keys(p).W, right.W, "W")
    return "U, " + differ(factors_with_undecayed_keys(p).U, right.U, "U")


def chunk_by_chunk():
    """``exact.chunkwise`` on Fractions, resets and repeated keys among them, for five chunk lengths."""
    for T, K, V in ((7, 2, 3), (13, 4, 2)):
        p = rational(T, K, V)
        right = exact.recurrence(*p)
        for C in (1, 2, 3, 5, 16):
            found = exact.chunkwise(*p, chunk_size=C)
            equal(found.O, right.O, f"O, T={T}, C={C}")
            equal(found.S, right.S, f"S, T={T}, C={C}")


IDENTITIES = [
    Identity("5.1", "S_t/γ_t obeys the ungated rule with v_t/γ_t", scaled_state_is_ungated),
    Identity("5.2", "diag(γ)(I + L)⁻¹diag(γ)⁻¹ = (I + Γ⊙L)⁻¹ = A", one_inverse_for_both),
    Identity("5.3", "U = A diag(β)V  and  W = A diag(β)diag(γ)K", factors_share_the_inverse),
    Identity("5.4", "E = U − W S_0 is the delta: E_t = β_t(v_t − α_t k_t S_{t−1})", e_is_the_delta),
    Identity("5.5", "O = diag(γ)Q S_0 + (QKᵀ⊙Γ)E", outputs_of_a_chunk),
    Identity("5.6", "S_C = γ_C S_0 + (diag(γ_C/γ)K)ᵀE", state_after_a_chunk),
    Identity("5.7", "O = diag(γ)Q S_0 + (QKᵀ⊙M)E  (M in place of Γ)", mask_m_is_wrong, refuted=True),
    Identity("5.8", "A = (I + L)⁻¹  (A from undecayed keys)", undecayed_keys_are_wrong, refuted=True),
    Identity("5.9", "chunk by chunk = token by token, exactly, for every chunk length", chunk_by_chunk),
]
