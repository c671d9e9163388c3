"""Chapter 8, backward, token by token.  What a loss says about every input, given what it says about the outputs.

Three rungs: one token for any size, by traces of words; SymPy's own derivative of ``exact.recurrence`` for up to three
tokens; and dual numbers over the rationals, which differentiate a run of any length exactly.

In words S is the memory before a token, Λ the gradient of the one after it, d the row do, a, b the token's α, β.
"""

from typing import NamedTuple

import numpy as np
import sympy as sp

from .. import exact
from .algebra import (
    Dual,
    Identity,
    Problem,
    differ,
    entries,
    equal,
    gradient,
    rational,
    scalars,
    symbolic,
    trace,
    transposed,
    words,
)

a, = scalars("α", positive=True)
b, = scalars("β")
NAMES = words("q k v d S Λ M")
q, k, v, d, S, L, M = NAMES
qT, kT, vT, dT, ST, LT, MT = words("qᵀ kᵀ vᵀ dᵀ Sᵀ Λᵀ Mᵀ")
PARTNER = dict(zip(NAMES, (qT, kT, vT, dT, ST, LT, MT), strict=True))
PARTNER |= {transpose: word for word, transpose in PARTNER.items()}

AFTER = a * S + b * kT * (v - k * a * S)              # S_t, by (1.1)
e, y = v - k * a * S, k * L                           # the error, and what k reads of Λ
HL = L - b * kT * y                                   # HΛ


class Upstream(NamedTuple):
    """A loss: ⟨dO, O⟩ + ⟨dS, S_T⟩.  dO [T, V]; dS [K, V]."""

    dO: np.ndarray
    dS: np.ndarray

    def loss(self, output):
        """The loss, a number, of an exact.Output."""
        return np.sum(self.dO * output.O) + np.sum(self.dS * output.S)


def symbolic_cases():
    """Up to three tokens with a symbol for every entry, each with a loss."""
    for T, K, V in ((1, 2, 2), (2, 2, 1), (3, 1, 1)):
        yield symbolic(T, K, V), Upstream(entries("o", T, V), entries("s", K, V))


def one_token():
    """The smallest case of symbols, for residuals that can be read."""
    return symbolic(1, 1, 1), Upstream(entries("o", 1, 1), entries("s", 1, 1))


def rational_cases():
    """Longer ones of Fractions, α = 0 and repeated keys among them."""
    for T, K, V in ((6, 2, 2), (11, 3, 2)):
        other = rational(T, K, V, seed=8)
        yield rational(T, K, V), Upstream(other.v, other.S0)


def cases():
    """Both."""
    return [*symbolic_cases(), *rational_cases()]


def by_sympy(p, up, name):
    """SymPy's derivative of the loss through ``exact.recurrence`` with respect to every entry of one input."""
    loss, x = up.loss(exact.recurrence(*p)), getattr(p, name)
    return np.array([sp.diff(loss, entry) for entry in x.ravel()], dtype=object).reshape(x.shape)


def by_duals(p, up, name):
    """The same for numbers: one run on dual numbers for every entry."""
    x = getattr(p, name)
    found = np.empty(x.shape, dtype=object)
    for index in np.ndindex(*x.shape):
        moved = x.copy()
        moved[index] = Dual(x[index], 1)
        loss = up.loss(exact.recurrence(*p._replace(**{name: moved})))
        found[index] = getattr(loss, "slope", 0)
    return found


def made_of_symbols(up):
    """Whether a case is one of symbols; else it is one of Fractions."""
    return isinstance(up.dS[0, 0], sp.Symbol)


def derivative(p, up, name):
    """By SymPy where the problem is one of symbols, by dual numbers where it is one of Fractions."""
    return (by_sympy if made_of_symbols(up) else by_duals)(p, up, name)


def backward(p, up):
    """``exact.recurrence_backward`` of a case."""
    return exact.recurrence_backward(*p, *up)


def parts(p, up):
    """What chapter 8's formulas are made of, token by token: S̄ [T, K, V], S_t, Λ_t, e and y [T, V]."""
    S_, Lambda = exact.states(p.k, p.v, p.alpha, p.beta, p.S0), exact.adjoints(p.q, p.k, p.alpha, p.beta, *up)
    forgotten = p.alpha[:, None, None] * S_[:-1]
    errors = np.array([p.v[t] - p.k[t] @ forgotten[t] for t in range(len(p.k))])
    read = np.array([p.k[t] @ Lambda[t] for t in range(len(p.k))])
    return forgotten, S_[1:], Lambda, errors, read


def compare(gradient_name, input_name):
    """``exact.recurrence_backward`` against the derivative, in every case."""
    for p, up in cases():
        equal(getattr(backward(p, up), gradient_name), derivative(p, up, input_name), f"{gradient_name}, T={len(p.k)}")


def tail(p, up, t, state):
    """The loss of the tokens after t (a Problem from the state after token t), and of token t's own output."""
    rest = Problem(*(x[t + 1:] for x in p[:5]), state)
    return rest, Upstream(up.dO[t + 1:], up.dS)


def adjoint_recursion():
    """One token for any size; then Λ_t against the derivative by S_t of all that comes after, in every case."""
    equal(gradient(LT * AFTER, S, PARTNER), a * HL, "through one token, any size")
    equal(gradient(q * S * dT, S, PARTNER), qT * d, "through its output, any size")
    for p, up in cases():
        T, (K, V) = len(p.k), p.S0.shape
        found = exact.adjoints(p.q, p.k, p.alpha, p.beta, *up)
        S_ = exact.states(p.k, p.v, p.alpha, p.beta, p.S0)
        for t in range(T):
            rest, later = tail(p, up, t, entries("R", K, V) if made_of_symbols(up) else S_[t + 1])
            equal(found[t], np.outer(p.q[t], up.dO[t]) + derivative(rest, later, "S0"), f"Λ_{t + 1} of {T}")


def query_gradient():
    """o_t = q_t S_t, for any size; then the code against the formula's rows and against the derivative."""
    equal(gradient(q * S * dT, q, PARTNER), d * ST, "any size")
    for p, up in cases():
        after = parts(p, up)[1]
        equal(backward(p, up).dq, [after[t] @ up.dO[t] for t in range(len(p.k))], f"rows, T={len(p.k)}")
    compare("dq", "q")


def value_gradient():
    """As (8.2)."""
    equal(gradient(LT * AFTER, v, PARTNER), b * y, "any size")
    compare("dv", "v")


def strength_gradient():
    """As (8.2); the derivative by a number is a trace."""
    equal(trace(sp.diff(sp.expand(LT * AFTER), b), PARTNER), trace(e * transposed(y, PARTNER), PARTNER), "any size")
    compare("dbeta", "beta")


def key_gradient():
    """The key stands twice in a token: it writes, and before that it reads.  As (8.2)."""
    equal(gradient(LT * AFTER, k, PARTNER), b * (e * LT - a * y * ST), "any size")
    compare("dk", "k")


def decay_gradient():
    """α times the derivative by α, which is the derivative by g = log α.  As (8.2)."""
    slope = a * sp.diff(sp.expand(LT * AFTER), a)
    equal(trace(slope, PARTNER), trace(transposed(HL, PARTNER) * a * S, PARTNER), "any size")
    for p, up in cases():
        equal(backward(p, up).dg, p.alpha * derivative(p, up, "alpha"), f"dg, T={len(p.k)}")


def sum_of_later(p, up):
    """The right side of (8.7), [T]."""
    g = backward(p, up)
    shares = np.sum(p.q * g.dq, axis=1) - np.sum(p.v * g.dv, axis=1)
    return np.cumsum(shares[::-1])[::-1] + np.sum(exact.recurrence(*p).S * up.dS)


def decay_gradient_by_homogeneity():
    """Two steps for any size: ⟨HΛ, S̄⟩ = ⟨Λ, S_t⟩ − v·dv, and ⟨Λ, S_t⟩ = q·dq + ⟨what comes from later, S_t⟩."""
    equal(trace(transposed(HL, PARTNER) * a * S, PARTNER),
          trace(LT * AFTER, PARTNER) - trace(b * y * vT, PARTNER), "⟨HΛ, S̄⟩, any size")
    equal(trace(transposed(qT * d + M, PARTNER) * S, PARTNER),
          trace(q * S * dT, PARTNER) + trace(MT * S, PARTNER), "⟨Λ, S_t⟩, any size")
    for p, up in cases():
        equal(sum_of_later(p, up), backward(p, up).dg, f"T={len(p.k)}")


def first_state_gradient():
    """As (8.2); then the scalar product, in which the first decay's gradient shows again."""
    compare("dS0", "S0")
    for p, up in cases():
        g = backward(p, up)
        equal(np.sum(p.S0 * g.dS0), g.dg[0], f"T={len(p.k)}")


def exact_zeros():
    """Nothing to fade, nothing to gain by fading; and a reset hands no gradient back past itself."""
    for p, up in cases():
        equal(backward(p._replace(S0=p.S0 * 0), up).dg[0], sp.S.Zero, f"empty memory, T={len(p.k)}")
        at = len(p.k) // 2
        p.alpha[at] = p.alpha[at] * 0
        g = backward(p, up)
        equal(g.dg[at], sp.S.Zero, f"a reset, T={len(p.k)}")
        before = backward(Problem(*(x[:at] for x in p[:5]), p.S0), Upstream(up.dO[:at], up.dS * 0))
        equal(g.dS0, before.dS0, f"dS0, T={len(p.k)}")
        for name, x, wanted in zip(g._fields[:5], g, before, strict=False):
            if at:
                equal(x[:at], wanted, f"{name} before the reset, T={len(p.k)}")


def causal():
    """A loss of the outputs before t only, at every t; and no later output changes what is known of a later input."""
    for p, up in cases():
        T = len(p.k)
        for t in range(T):
            early = up.dO.copy()
            early[t:] = early[t:] * 0
            g = backward(p, Upstream(early, up.dS * 0))
            for name, x in zip(g._fields[:5], g, strict=False):
                equal(x[t:], x[t:] * 0, f"{name}, outputs before {t + 1} of {T}")


def write_alone_is_wrong():
    """The read is left out.  Right only where the memory is empty; the residual is what the read says."""
    p, up = one_token()
    _, _, Lambda, errors, _ = parts(p, up)
    found = [p.beta[t] * (Lambda[t] @ errors[t]) for t in range(len(p.k))]
    empty = p._replace(S0=p.S0 * 0)
    _, _, Lambda, errors, _ = parts(empty, up)
    equal(empty.beta[0] * (Lambda[0] @ errors[0]), derivative(empty, up, "k")[0], "an empty memory")
    return differ(found, derivative(p, up, "k"))


def decay_of_memory_alone_is_wrong():
    """H is left out: that the memory fades is seen, that the error is then larger is not.  Right at β = 0."""
    p, up = one_token()
    idle = p._replace(beta=p.beta * 0)
    for problem, decide in ((idle, equal), (p, differ)):
        forgotten, _, Lambda, _, _ = parts(problem, up)
        wanted = problem.alpha * derivative(problem, up, "alpha")
        answer = decide([np.sum(Lambda[0] * forgotten[0])], wanted)
    return answer


def raw_gate_gradients():
    """SymPy's derivatives; σ the logistic function.  With dg and dβ from above, da = dg ∂g/∂a and so on."""
    A, x, t = scalars("A_log a dt_bias")
    sigmoid = 1 / (1 + sp.exp(-x))
    g = -sp.exp(A) * sp.log(1 + sp.exp(x + t))
    for symbol in (x, t):
        equal(sp.diff(g, symbol), -sp.exp(A) * sigmoid.subs(x, x + t), f"g by {symbol}")
    equal(sp.diff(g, A), g, "g by A_log")
    for factor in (1, 2):
        beta = factor * sigmoid
        equal(sp.diff(beta, x), beta * (1 - beta / factor), f"β = {factor}σ(b)")


def norm_gradient():
    """SymPy's derivative of ⟨dy, x/√(‖x‖² + ε)⟩ for three entries; y is the normalised row, shorter than 1."""
    x, dy = entries("x", 3), entries("y", 3)
    eps, = scalars("ε", positive=True)
    r = 1 / sp.sqrt(np.sum(x * x) + eps)
    loss = np.sum(dy * x * r)
    wanted = r * (dy - (x * r) * np.sum(x * r * dy))
    equal([sp.diff(loss, entry) for entry in x], wanted)


IDENTITIES = [
    Identity("8.1", "∂loss/∂S_t = Λ_t = q_tᵀdo_t + α_{t+1}H_{t+1}Λ_{t+1},  Λ_T = q_Tᵀdo_T + dS_T", adjoint_recursion),
    Identity("8.2", "dq_t = do_t S_tᵀ", query_gradient),
    Identity("8.3", "dv_t = β_t y_t  with  y_t = k_tΛ_t", value_gradient),
    Identity("8.4", "dβ_t = ⟨y_t, e_t⟩  with  e_t = v_t − k_tS̄_t,  S̄_t = α_tS_{t−1}", strength_gradient),
    Identity("8.5", "dk_t = β_t(e_tΛ_tᵀ − y_tS̄_tᵀ)", key_gradient),
    Identity("8.6", "dg_t = ⟨H_tΛ_t, S̄_t⟩", decay_gradient),
    Identity("8.7", "dg_t = Σ_{s≥t}(q_s·dq_s − v_s·dv_s) + ⟨S_T, dS_T⟩", decay_gradient_by_homogeneity),
    Identity("8.8", "dS_0 = α_1H_1Λ_1  and  ⟨S_0, dS_0⟩ = dg_1", first_state_gradient),
    Identity("8.9", "S_0 = 0 ⇒ dg_1 = 0;  α_t = 0 ⇒ dg_t = 0, and no gradient passes to what came before t",
             exact_zeros),
    Identity("8.10", "a loss of the outputs before t has gradient 0 at every input from t on", causal),
    Identity("8.11", "dk_t = β_t e_tΛ_tᵀ  (the key that writes, without the key that reads)", write_alone_is_wrong,
             refuted=True),
    Identity("8.12", "dg_t = ⟨Λ_t, S̄_t⟩  (without H_t)", decay_of_memory_alone_is_wrong, refuted=True),
    Identity("8.13", "∂g/∂a = ∂g/∂dt_bias = −e^{A_log}σ(a + dt_bias),  ∂g/∂A_log = g,  ∂β/∂b = β(1 − β)",
             raw_gate_gradients),
    Identity("8.14", "y = rx, r = (‖x‖² + ε)^−½:  dx = r(dy − y⟨y, dy⟩)", norm_gradient),
]
