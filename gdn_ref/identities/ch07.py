"""Chapter 7, range and precision.  All is proved; (7.3), (7.4) and (7.7) are also measured, in float32."""

import numpy as np
import sympy as sp

from .. import exact
from .algebra import Identity, entries, equal, holds, identity, rational, scalars

FLOAT32_MAX = (2 - sp.Rational(1, 2 ** 23)) * 2 ** 127


def between(alpha, i, j):
    """Π of α over the tokens after j up to i."""
    return sp.prod(alpha[j + 1:i + 1])


def decays_are_differences():
    """``exact.decay`` on α = e^g; then 0 ≤ Γ ≤ 1, with α = 1/(1 + s), s ≥ 0, and on Fractions where α = 0 too."""
    g = entries("g", 5)
    gamma, Gamma = exact.decay(np.array([sp.exp(x) for x in g], dtype=object))
    G = np.cumsum(g)
    equal(gamma, [sp.exp(x) for x in G], "γ = e^G")
    s = entries("s", 5, nonnegative=True)
    alpha = 1 / (1 + s)
    bounded = exact.decay(alpha).Gamma
    for i in range(5):
        for j in range(i):
            equal(Gamma[i, j], sp.exp(sp.expand(G[i] - G[j])), f"Γ[{i}, {j}]")
            equal(bounded[i, j], between(alpha, i, j), f"product, Γ[{i}, {j}]")
            top, bottom = sp.fraction(sp.together(1 - bounded[i, j]))
            holds(bounded[i, j].is_nonnegative, "0 ≤ Γ")
            holds(sp.expand(top).is_nonnegative and bottom.is_positive, "Γ ≤ 1")
    equal(Gamma - np.tril(Gamma, -1), identity(5), "ones on the diagonal, nothing above it")
    numbers = exact.decay(rational(12, 1, 1).alpha).Gamma
    holds(all(0 <= x <= 1 for x in numbers.ravel()), "0 ≤ Γ ≤ 1 on Fractions, α = 0 among them")


def base_two():
    """SymPy rewrites the power of two as an exponential."""
    x, = scalars("x")
    log2_of_e = 1 / sp.log(2)
    equal((2 ** (x * log2_of_e)).rewrite(sp.exp), sp.exp(x))


def tokens_until_overflow(g):
    """How many tokens at log decay g (a Rational < 0) keep 1/γ within float32; decided with exact logarithms."""
    n = int(sp.floor(sp.log(FLOAT32_MAX) / -g))
    holds(-g * n <= sp.log(FLOAT32_MAX), "n tokens still fit")
    holds(-g * (n + 1) > sp.log(FLOAT32_MAX), "one more does not")
    return n


def reciprocal_overflows():
    """float32's largest number is (2 − 2^−23)·2^127."""
    equal(sp.Rational(*float(np.finfo(np.float32).max).as_integer_ratio()), FLOAT32_MAX, "largest float32")
    holds(sp.Rational("88.72") < sp.log(FLOAT32_MAX), "88.72 < log max")
    holds(sp.log(FLOAT32_MAX) < sp.Rational("88.73"), "log max < 88.73")
    equal(tokens_until_overflow(sp.Rational(-8, 5)), 55, "g = −1.6")
    equal(tokens_until_overflow(sp.Rational(-21, 2)), 8, "g = −10.5")
    with np.errstate(over="ignore"):
        holds(np.isfinite(np.exp(np.float32(1.6 * 55))), "55 tokens at −1.6, measured")
        holds(np.isinf(np.exp(np.float32(1.6 * 56))), "56 tokens at −1.6, measured")


def to_bfloat16(x):
    """The bfloat16 next to a float32, ties to even, given back as float32: the upper 16 bits, rounded."""
    bits = int(np.float32(x).view(np.uint32))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return np.uint32(bits).view(np.float32)


def bfloat16_loses_a_slow_decay():
    """Below 1 the bfloat16 numbers are 2^−8 apart, so what lies above the midpoint 1 − 2^−9 goes to 1."""
    holds(sp.exp(-sp.Rational(1, 1000)) > 1 - sp.Rational(1, 2 ** 9), "e^−0.001 lies above the midpoint")
    holds(sp.exp(-sp.Rational(1, 1000)) < 1, "and below 1")
    equal(int(to_bfloat16(1 - 2.0 ** -8) * 256), 255, "the neighbour below 1")
    equal(int(to_bfloat16(1 - 2.0 ** -9 + 2.0 ** -20) == 1), 1, "just above the midpoint")
    equal(int(to_bfloat16(np.exp(-0.001)) == 1), 1, "e^−0.001, measured")


def zero_decay_is_a_reset():
    """With α = 0 replaced by 1, that is g dropped from the sum, and pairs across it masked, Γ is the same."""
    def masked(alpha):
        zero = np.array([x == 0 for x in alpha])
        segment = np.cumsum(zero)
        same = (segment[:, None] == segment[None, :]).astype(int).astype(object)
        return same * exact.decay(np.where(zero, 1, alpha)).Gamma

    for r in range(5):
        alpha = entries("α", 5, positive=True)
        alpha[r] = sp.S.Zero
        Gamma = exact.decay(alpha).Gamma
        equal(masked(alpha), Gamma, f"reset at {r}")
        holds(not Gamma[r:, :r].any(), f"block diagonal, reset at {r}")
    alpha = rational(12, 1, 1).alpha
    equal(masked(alpha), exact.decay(alpha).Gamma, "several resets")


def raw_gates():
    """With the domain: all four inputs real."""
    a, b, A_log, dt_bias = scalars("a b A_log dt_bias")
    softplus = sp.log(1 + sp.exp(a + dt_bias))
    g, beta = -sp.exp(A_log) * softplus, 1 / (1 + sp.exp(-b))
    holds(softplus.is_positive, "softplus > 0")
    holds(g.is_negative, "g < 0, and 0 only as a limit")
    holds(beta.is_positive, "β > 0")
    holds(sp.together(1 - beta).is_positive, "β < 1")
    equal(sp.limit(g.subs({A_log: 0, dt_bias: 0}), a, -sp.oo), 0, "no decay, as a limit")


def quotient_form(q, k, v, alpha, beta, S0):
    """The seed's chunk: ungated factors, values (β/γ)v, everything multiplied by γ at the end."""
    gamma, one = np.cumprod(alpha), alpha * 0 + 1
    wy = exact.wy_recursion(k, v / gamma[:, None], one, beta)
    E = wy.U - wy.W @ S0
    return exact.Output(gamma[:, None] * (q @ S0 + np.tril(q @ k.T) @ E), gamma[-1] * (S0 + k.T @ E))


def strong_decay(g=-1.6, C=64, K=8):
    """One chunk in float64 at a constant log decay, unit keys, from a fixed generator."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, C, K))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    return q, k, v, np.full(C, np.exp(g)), rng.uniform(0, 1, C), rng.standard_normal((K, K))


def reciprocal_decay_breaks_in_float32():
    """Exact over the rationals, so the algebra is not at fault; wrong in float32, where the differences are right."""
    p = rational(8, 3, 2, resets=False)
    equal(quotient_form(*p).O, exact.recurrence(*p).O, "over the rationals, O")
    equal(quotient_form(*p).S, exact.recurrence(*p).S, "over the rationals, S")
    wanted, single = exact.recurrence(*strong_decay()), [x.astype(np.float32) for x in strong_decay()]
    with np.errstate(all="ignore"):
        quotient = relative_error(quotient_form(*single).O, wanted.O)
    difference = exact.chunk(*single)
    holds(difference.O.dtype == np.float32, "the arithmetic is float32")
    holds(relative_error(difference.O, wanted.O) <= 1e-6, "differences are right to 1e-6, O")
    holds(relative_error(difference.S, wanted.S) <= 1e-6, "differences are right to 1e-6, S")
    holds(not quotient < 0.1, "the quotient form is wrong by a tenth at least, or NaN")
    return "float32, 64 tokens at g = −1.6: " + ("NaN" if np.isnan(quotient) else "error above a tenth")


def relative_error(found, wanted):
    """‖found − wanted‖ / ‖wanted‖ in float64."""
    return np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(wanted)


IDENTITIES = [
    Identity("7.1", "Γ_ij = Π_{j<m≤i} α_m = e^(G_i − G_j)  and  0 ≤ Γ ≤ 1", decays_are_differences),
    Identity("7.2", "e^x = 2^(x·log2 e)", base_two),
    Identity("7.3", "1/γ overflows float32 once −G > 88.72: after 55 tokens at g = −1.6, 8 at −10.5",
             reciprocal_overflows),
    Identity("7.4", "bf16(e^−0.001) = 1", bfloat16_loses_a_slow_decay),
    Identity("7.5", "α = 0 resets: Γ is block diagonal, the same with that g dropped and the pairs across it masked",
             zero_decay_is_a_reset),
    Identity("7.6", "g = −exp(A_log)·softplus(a + dt_bias) ≤ 0  and  β = sigmoid(b) ∈ (0, 1)", raw_gates),
    Identity("7.7", "in float32 ũ = (β/γ)v gives the recurrence's values", reciprocal_decay_breaks_in_float32,
             refuted=True),
]
