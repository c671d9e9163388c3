"""Chapter 1, memory that overwrites.  k is a row, kT the column; S̄ = αS is the state after forgetting."""

import numpy as np
import sympy as sp

from .. import exact
from .algebra import Identity, differ, entries, equal, scalars, symbolic, words

a, b = scalars("α β")
k, kT, S, v = words("k kᵀ S v")

H = 1 - b * kT * k
FORGET_FIRST = a * H * S + b * kT * v                 # the definition
FORGET_LAST = a * S + b * kT * (v - k * S)            # the error is read before the decay


def definition_is_forget_read_correct():
    """Any size by words; then ``exact.step`` itself on symbols, K = 3, V = 2."""
    forgotten = a * S
    equal(FORGET_FIRST, forgotten + b * kT * (v - k * forgotten))
    p = symbolic(1, 3, 2)
    q_, k_, v_, a_, b_ = (x[0] for x in p[:5])
    o_, S_ = exact.step(q_, k_, v_, a_, b_, p.S0)
    H_ = np.eye(3, dtype=object) - b_ * np.outer(k_, k_)
    equal(S_, a_ * H_ @ p.S0 + b_ * np.outer(k_, v_), "exact.step, S")
    equal(o_, q_ @ S_, "exact.step, o")


def delta_rule_is_a_gradient_step():
    """SymPy's own derivative of the recall loss.  The loss is a sum over the V columns, so V adds nothing new."""
    for K, V in ((1, 1), (2, 3), (4, 2)):
        k_, v_, S_ = entries("k", K), entries("v", V), entries("S", K, V)
        loss = sum((k_ @ S_ - v_) ** 2) / 2
        gradient = np.vectorize(lambda s, loss=loss: sp.diff(loss, s), otypes=[object])(S_)
        H_ = np.eye(K, dtype=object) - b * np.outer(k_, k_)
        equal(S_ - b * gradient, H_ @ S_ + b * np.outer(k_, v_), f"K={K}, V={V}")


def reading_what_was_written():
    """‖k‖² is the 1×1 matrix k kᵀ, so in words it may stand to the left of k and of v."""
    square = k * kT
    equal(k * FORGET_FIRST, a * (1 - b * square) * k * S + b * square * v)


def forget_first_minus_forget_last():
    """Any size by words."""
    equal(FORGET_FIRST - FORGET_LAST, b * (1 - a) * kT * k * S)


def forget_last_is_another_rule():
    """Equal without decay, at α = 1; otherwise the residual stays."""
    equal(FORGET_FIRST.subs(a, 1), FORGET_LAST.subs(a, 1), "α = 1")
    return differ(FORGET_FIRST, FORGET_LAST)


IDENTITIES = [
    Identity("1.1", "α(I − βkᵀk)S + βkᵀv = S̄ + βkᵀe  with S̄ = αS, e = v − kS̄", definition_is_forget_read_correct),
    Identity("1.2", "S − β∇½‖kS − v‖² = (I − βkᵀk)S + βkᵀv", delta_rule_is_a_gradient_step),
    Identity("1.3", "kS_t = α(1 − β‖k‖²)kS_{t−1} + β‖k‖²v", reading_what_was_written),
    Identity("1.4", "forget-first − forget-last = β(1 − α)kᵀkS_{t−1}", forget_first_minus_forget_last),
    Identity("1.5", "forget-last αS + βkᵀ(v − kS) equals forget-first", forget_last_is_another_rule, refuted=True),
]
