"""Chapter 9, backward, by chunk.  The gradients of chapter 8, a chunk of tokens at a time.

In words K, Q, V, R, E are a chunk's matrices, G = diag(γ), B = diag(β), Γ_e = diag(γ_C/γ), A = A_r, P = QKᵀ⊙Γ; X, Y
stand for dS' and dO.  The mask of P or of L is not a word: what rests on it is proved with entries.
"""

from fractions import Fraction
from typing import NamedTuple

import numpy as np
import sympy as sp

from .. import exact
from .algebra import (
    Identity,
    Problem,
    differ,
    entries,
    equal,
    gradient,
    holds,
    rational,
    scalars,
    strictly_lower,
    transposed,
    words,
)
from .ch08 import Upstream, backward, cases, made_of_symbols, parts

NAMES = words("K Q V S R E A P N X Y Z L T D M")
K, Q, V, S, R, E, A, P, N, X, Y, Z, L, T, D, M = NAMES
TRANSPOSES = words("Kᵀ Qᵀ Vᵀ Sᵀ Rᵀ Eᵀ Aᵀ Pᵀ Nᵀ Xᵀ Yᵀ Zᵀ Lᵀ Tᵀ Dᵀ Mᵀ")
KT, QT, VT, ST, RT, ET, AT, PT, NT, XT, YT, ZT, LT, TT, DT, MT = TRANSPOSES
G, B, Ge = words("G B Γₑ")                            # diagonal, so their own transposes
c, = scalars("γ_C", positive=True)
PARTNER = dict(zip(NAMES, TRANSPOSES, strict=True))
PARTNER |= {transpose: word for word, transpose in PARTNER.items()} | {G: G, B: B, Ge: Ge}


class Chunk(NamedTuple):
    """A case seen as one chunk: the arguments that ``exact.rows_backward`` and ``exact.decay_shares`` take."""

    q: np.ndarray
    k: np.ndarray
    beta: np.ndarray
    gamma: np.ndarray
    Gamma: np.ndarray
    R: np.ndarray
    dO: np.ndarray
    dV: np.ndarray
    S: np.ndarray
    dS: np.ndarray


def chunk_of(p, up):
    """A case (Problem, Upstream) as one Chunk."""
    gamma, Gamma = exact.decay(p.alpha)
    A_r = exact.right_inverse(p.k, p.beta, Gamma)
    R_ = exact.chunk_errors(p.k, p.v, A_r, gamma, p.S0)
    dV = exact.values_backward(p.q, p.k, p.beta, A_r, Gamma, *up)
    return Chunk(p.q, p.k, p.beta, gamma, Gamma, R_, up.dO, dV, p.S0, up.dS)


def each_case():
    """(name, Problem, Upstream, Chunk) of every case."""
    for p, up in cases():
        yield f"C={len(p.k)}", p, up, chunk_of(p, up)


def inverse_gradient():
    """To first order (I + L + hδ)⁻¹ = T − hTδT; then SymPy's derivative by every entry of a general L, C = 3."""
    h, = scalars("h")
    d, = words("δ")
    product = sp.expand((1 + L + h * d) * (1 / (1 + L) - h * 1 / (1 + L) * d * 1 / (1 + L)))
    equal(product.coeff(h, 1).subs(L, M - 1).expand(), sp.S.Zero, "first order, any size")
    equal(gradient(-DT * A * L * A, L, PARTNER), -AT * D * AT, "the gradient of ⟨dT, −T δL T⟩, any size")
    lower, dT = strictly_lower("L", 3), entries("d", 3, 3)
    T_ = exact.solve_tril(lower)
    loss = np.sum(dT * T_)
    wanted = [[sp.diff(loss, lower[i, j]) if j < i else sp.S.Zero for j in range(3)] for i in range(3)]
    equal(exact.tril_inverse_backward(T_, dT), wanted, "general L, C=3")


def inverse_of_a_product():
    """Any size by words, T and E = TY; then numbers."""
    equal(TT * (E * YT) * TT, (TT * E) * transposed(T * Y, PARTNER), "dT = dE Yᵀ, any size")
    p, other = rational(6, 2, 2), rational(6, 2, 3, seed=9)
    T_ = exact.solve_tril(exact.chunk_scaled_dot_kkt_fwd(p.k, p.beta, exact.decay(p.alpha).Gamma))
    dE, Y_ = other.v, rational(6, 2, 3, seed=10).v
    equal(exact.tril_inverse_backward(T_, dE @ Y_.T), -np.tril((T_.T @ dE) @ (T_ @ Y_).T, -1), "C=6")


def rows_are_errors():
    """B(I + NB) = (I + BN)B moves β across, for any size; then R's rows against the states, and E = diag(β)R."""
    equal(sp.expand(B * (1 + N * B)), sp.expand((1 + B * N) * B), "any size")
    for where, p, up, chunk in each_case():
        _, _, _, errors, _ = parts(p, up)
        equal(chunk.R, errors, f"R, {where}")
        A_ = exact.solve_tril(exact.chunk_scaled_dot_kkt_fwd(p.k, p.beta, chunk.Gamma))
        A_r = exact.right_inverse(p.k, p.beta, chunk.Gamma)
        equal(p.beta[:, None] * A_r, A_ * p.beta[None, :], f"diag(β)A_r, {where}")
        E_ = exact.chunk_delta(exact.wy_solve(p.k, p.v, p.alpha, p.beta), p.S0)
        equal(p.beta[:, None] * chunk.R, E_, f"E, {where}")


def delta_gradient():
    """(5.5) and (5.6) for any size; then entries: the derivative of the chunk's loss by a free E."""
    loss = YT * (G * Q * S + P * E) + XT * (c * S + KT * Ge * E)
    equal(gradient(loss, E, PARTNER), PT * Y + Ge * K * X, "any size")
    for where, p, up, chunk in list(each_case())[:3]:
        E_ = entries("E", *p.v.shape)
        O = exact.chunk_output(p.q, p.k, chunk.gamma, chunk.Gamma, E_, p.S0)
        loss = up.loss(exact.Output(O, exact.chunk_state(p.k, chunk.gamma, chunk.Gamma, E_, p.S0)))
        found = (chunk.Gamma * (p.q @ p.k.T)).T @ up.dO + chunk.Gamma[-1][:, None] * (p.k @ up.dS)
        equal(found, [[sp.diff(loss, x) for x in row] for row in E_], where)


def value_gradient():
    """E = B A_r(V − GKS) for any size; then ``exact.values_backward`` against chapter 8, and its rows β_t k_tΛ_t."""
    equal(gradient(ET * B * A * (V - G * K * S), V, PARTNER), AT * B * E, "any size, E in the place of dE")
    for where, p, up, chunk in each_case():
        _, _, _, _, read = parts(p, up)
        equal(chunk.dV, p.beta[:, None] * read, f"rows, {where}")
        equal(chunk.dV, backward(p, up).dv, where)


def state_gradient():
    """S stands in O, in S' and in R; for any size, with dV = Aᵀ dR.  Then ``exact.state_backward``."""
    loss = YT * G * Q * S + XT * c * S + RT * A * (V - G * K * S)
    equal(gradient(loss, S, PARTNER), c * X + QT * G * Y - KT * G * (AT * R), "any size, R in the place of dR")
    for where, p, up, chunk in each_case():
        found = exact.state_backward(p.q, p.k, chunk.gamma, up.dO, chunk.dV, up.dS)
        equal(found, backward(p, up).dS0, where)


def outer_rows(left, right):
    """Row t: left_t right_tᵀ, for left [C, V] and right [C, K, V].  [C, K]"""
    return np.array([right[t] @ left[t] for t in range(len(left))])


def query_gradient():
    """The scores' gradient is F diag(β), as a mask goes from one factor of a trace to the other; then the rows."""
    equal(gradient(YT * G * Q * S + MT * Q * KT * B, Q, PARTNER), G * Y * ST + M * B * K, "any size, M in place of F")
    for where, p, up, chunk in each_case():
        dq = exact.rows_backward(*chunk)[0]
        equal(dq, outer_rows(up.dO, parts(p, up)[1]), f"rows, {where}")
        equal(dq, backward(p, up).dq, where)


def reading_key_gradient():
    """The key that reads stands in GKS and on the left of KKᵀ.  Then the rows."""
    loss = -ZT * G * K * S - MT * K * NT * B
    equal(gradient(loss, K, PARTNER), -G * Z * ST - M * B * N, "any size, M for J, Z for dV, N for the keys met")
    for where, p, up, chunk in each_case():
        forgotten = parts(p, up)[0]
        equal(exact.rows_backward(*chunk)[1], -outer_rows(chunk.dV, forgotten), f"rows, {where}")


def writing_key_gradient():
    """The key that writes stands in S', and on the right of QKᵀ and KKᵀ; each time beside β.  Then the rows."""
    loss = XT * KT * Ge * R + MT * Q * KT - LT * N * KT
    equal(gradient(loss, K, PARTNER), Ge * R * XT + MT * Q - LT * N, "any size, M for F, L for J, N for keys that meet")
    for where, p, up, chunk in each_case():
        _, _, Lambda, errors, _ = parts(p, up)
        equal(exact.rows_backward(*chunk)[2], outer_rows(errors, Lambda), f"rows, {where}")


def key_and_strength_gradients():
    """With y_t = k_tΛ_t:  a + βc is (8.5) and k·c is (8.4), row by row; then against chapter 8."""
    for where, p, up, chunk in each_case():
        _, a, c_ = exact.rows_backward(*chunk)
        equal(a + p.beta[:, None] * c_, backward(p, up).dk, f"dk, {where}")
        equal(np.sum(p.k * c_, axis=1), backward(p, up).dbeta, f"dβ, {where}")


def differences(X_):
    """rowsum X − colsum X [C], the chunk's end counted with its last token."""
    rows, columns = np.sum(X_, axis=1), np.sum(X_, axis=0)
    dG = rows[:-1] - columns[1:]
    dG[-1] = dG[-1] + rows[-1]
    return dG


def by_differences(X_):
    """dg [C] as the reverse cumulative sum of ``differences``."""
    return np.cumsum(differences(X_)[::-1])[::-1]


def decay_gradient_by_sums():
    """∂e^{G_i − G_j}/∂G is +1 at i and −1 at j times itself, by SymPy; then dg against chapter 8."""
    Gi, Gj = scalars("G_i G_j")
    equal(sp.diff(sp.exp(Gi - Gj), Gi), sp.exp(Gi - Gj), "at i")
    equal(sp.diff(sp.exp(Gi - Gj), Gj), -sp.exp(Gi - Gj), "at j")
    for where, p, up, chunk in each_case():
        equal(by_differences(exact.decay_shares(*chunk)), backward(p, up).dg, where)


def sums_are_scalar_products():
    """Neither X nor a sum over V is needed for the row and column sums."""
    for where, p, up, chunk in each_case():
        dq, a, c_ = exact.rows_backward(*chunk)
        X_, out = exact.decay_shares(*chunk), exact.recurrence(*p)
        rows, columns = np.sum(p.q * dq + p.k * a, axis=1), p.beta * np.sum(p.k * c_, axis=1)
        equal(np.sum(X_, axis=1)[:-1], rows, f"rows, {where}")
        equal(np.sum(X_, axis=0)[1:], columns, f"columns, {where}")
        equal(np.sum(X_[-1]), np.sum(out.S * up.dS), f"the chunk's end, {where}")
        equal(rows - columns, np.sum(out.O * up.dO - p.v * chunk.dV, axis=1), f"rows less columns, {where}")


def decay_gradient_by_pairs():
    """α_t is a factor of the decay from j to i just when j < t ≤ i; for general shares, then against chapter 8."""
    alpha = entries("α", 4, positive=True)
    whole = exact.decay(np.concatenate([alpha[:1] * 0 + 1, alpha])).Gamma    # row 0: the chunk's start
    weights = np.tril(entries("w", 5, 5))
    loss = np.sum(weights * whole)
    shares = np.zeros((5, 5), dtype=object)
    shares[:4] = weights[1:] * whole[1:]
    equal(exact.decay_backward(shares), [x * sp.diff(loss, x) for x in alpha], "general shares, C=4")
    for where, p, up, chunk in each_case():
        equal(exact.decay_backward(exact.decay_shares(*chunk)), backward(p, up).dg, where)


def pairs_are_zero_one_by_one():
    """Not only the sum: each share across a reset, and across the first token of an empty memory, is 0."""
    for where, p, _, chunk in each_case():
        X_ = exact.decay_shares(*chunk._replace(S=p.S0 * 0))
        equal(X_[:, 0], X_[:, 0] * 0, f"an empty memory, {where}")
    for p, up in cases():
        at = len(p.k) // 2
        p.alpha[at] = p.alpha[at] * 0
        across = exact.decay_shares(*chunk_of(p, up))[at:, :at + 1]
        equal(across, across * 0, f"a reset, C={len(p.k)}")


def chunk_by_chunk():
    """``exact.chunkwise_backward`` and all its gradients at once, in many chunk lengths where entries are numbers."""
    for p, up in cases():
        wanted = backward(p, up)
        for size in (2,) if made_of_symbols(up) else (1, 2, 3, 4, 7, 16):
            found = exact.chunkwise_backward(*p, *up, chunk_size=size)
            for name, x, y in zip(wanted._fields, found, wanted, strict=True):
                equal(x, y, f"{name}, T={len(p.k)}, C={size}")


def untransposed_is_wrong():
    """From two tokens on; the derivative of a matrix's inverse is a sum over both of its sides."""
    lower, dT = strictly_lower("L", 2), np.tril(entries("d", 2, 2))
    T_ = exact.solve_tril(lower)
    right = exact.tril_inverse_backward(T_, dT)
    equal(right[1, 0], sp.diff(np.sum(dT * T_), lower[1, 0]), "the transposed one")
    return differ(-np.tril(T_ @ dT @ T_, -1), right)


def strong_decay(halvings):
    """12 tokens of float64 with α near 2^−halvings and a loss of their outputs: (Problem, Upstream)."""
    p, other = rational(12, 4, 3, resets=False), rational(12, 4, 3, seed=9)
    p = p._replace(alpha=p.alpha / 2 ** halvings)
    return Problem(*(x.astype(np.float64) for x in p)), Upstream(*(x.astype(np.float64) for x in (other.v, p.S0 * 0)))


def rationals(arrays):
    """The very same numbers as Fractions."""
    return [np.frompyfunc(Fraction, 1, 1)(x) for x in arrays]


def largest_error(found, wanted):
    """The largest relative error of any entry, for floats against Fractions."""
    return max(abs(float((Fraction(float(x)) - y) / y)) for x, y in zip(found, wanted, strict=True))


def differences_lose_the_gradient():
    """The shares on the diagonal cancel, on paper exactly, in float64 to its rounding; what is left may be smaller.

    The same shares added by pairs keep their digits, as nothing large is among them.
    """
    p, up = strong_decay(50)
    wanted = backward(Problem(*rationals(p)), Upstream(*rationals(up))).dg
    X_ = exact.decay_shares(*chunk_of(p, up))
    pairs, sums = largest_error(exact.decay_backward(X_), wanted), largest_error(by_differences(X_), wanted)
    holds(pairs < 1e-12, "the pairs keep twelve digits")
    holds(sums > 10, "the difference of sums is off by ten times dg")
    return "float64, α near 2⁻⁵⁰: off by more than ten times dg, where the pairs keep twelve digits"


IDENTITIES = [
    Identity("9.1", "T = (I + L)⁻¹:  dL = −tril(TᵀdT Tᵀ, −1)", inverse_gradient),
    Identity("9.2", "E = TY, so dT = dE Yᵀ:  dL = −tril((TᵀdE)Eᵀ, −1)", inverse_of_a_product),
    Identity("9.3", "R = A_r(V − diag(γ)KS), A_r = (I + Γ⊙tril(KKᵀ, −1)diag(β))⁻¹: row t is e_t;  E = diag(β)R",
             rows_are_errors),
    Identity("9.4", "dE = (QKᵀ⊙Γ)ᵀdO + diag(γ_C/γ)K dS'", delta_gradient),
    Identity("9.5", "dV = A_rᵀdiag(β)dE = diag(β)AᵀdE: row t is β_tk_tΛ_t", value_gradient),
    Identity("9.6", "dS = γ_C dS' + (diag(γ)Q)ᵀdO − (diag(γ)K)ᵀdV", state_gradient),
    Identity("9.7", "dQ = diag(γ)dO Sᵀ + F diag(β)K,  F = Γ⊙(dO Rᵀ): row t is do_tS_tᵀ", query_gradient),
    Identity("9.8", "a = −diag(γ)dV Sᵀ − J diag(β)K,  J = tril(Γ⊙(dV Rᵀ), −1): row t is −dv_tS̄_tᵀ",
             reading_key_gradient),
    Identity("9.9", "c = diag(γ_C/γ)R dS'ᵀ + FᵀQ − JᵀK: row t is e_tΛ_tᵀ", writing_key_gradient),
    Identity("9.10", "dK = a + diag(β)c,  dβ_t = k_t·c_t", key_and_strength_gradients),
    Identity("9.11", "X = dΓ⊙Γ over all decays of the chunk: dG = rowsum X − colsum X,  dg_t = Σ_{i≥t} dG_i",
             decay_gradient_by_sums),
    Identity("9.12", "rowsum X = q·dq + k·a,  colsum X = β k·c;  their difference is o·do − v·dv",
             sums_are_scalar_products),
    Identity("9.13", "dg_t = Σ X_ij over j < t ≤ i, the decays that lie across token t", decay_gradient_by_pairs),
    Identity("9.14", "each X_ij across a reset is 0, and each from an empty memory: then dg_t = 0 also in floats",
             pairs_are_zero_one_by_one),
    Identity("9.15", "backward chunk by chunk = token by token, exactly, for every chunk length", chunk_by_chunk),
    Identity("9.16", "dL = −tril(T dT T, −1)  (without the transposes)", untransposed_is_wrong, refuted=True),
    Identity("9.17", "in float64 the reverse cumulative sum of rowsum X − colsum X gives dg",
             differences_lose_the_gradient, refuted=True),
]
