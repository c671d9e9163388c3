"""Chapter 4, one chunk without a gate: α = 1.

In words k, v, q are the token's rows, K, U, W the rows before it, S0 the state at the chunk's start.
"""

import numpy as np

from .. import exact
from .algebra import Identity, equal, identity, scalars, words
from .ch03 import lower, problems

b, = scalars("β")
k, kT, v, q, KT, W, U, S0 = words("k kᵀ v q Kᵀ W U S₀")

STATE = S0 + KT * (U - W * S0)                        # S_{t−1}, by (4.3)
u = b * (v - k * KT * U)                              # the row that (3.2) appends
w = b * (k - k * KT * W)                              # the row that (3.1) appends


def states(p):
    """S_0, S_1, … S_T, [T + 1, K, V], by the recurrence."""
    return [exact.recurrence(*(x[:t] for x in p[:5]), p.S0).S for t in range(len(p.k) + 1)]


def factors(p):
    """WY by the recursion and by the solve."""
    return [(wy.__name__, wy(p.k, p.v, p.alpha, p.beta)) for wy in (exact.wy_recursion, exact.wy_solve)]


def triangular_system():
    """As (3.5), for the values."""
    for p in problems():
        for name, wy in factors(p):
            C = len(p.k)
            equal((identity(C) + lower(p.k, p.beta)) @ wy.U, p.beta[:, None] * p.v, f"{name}, C={C}")


def pseudo_value_is_the_delta():
    """One row for any size, then ``exact.chunk_delta`` against the states of the recurrence."""
    equal(u - w * S0, b * (v - k * STATE), "one row, any size")
    for p in problems():
        S = states(p)
        deltas = np.array([p.beta[t] * (p.v[t] - p.k[t] @ S[t]) for t in range(len(p.k))])
        for name, wy in factors(p):
            equal(exact.chunk_delta(wy, p.S0), deltas, f"{name}, C={len(p.k)}")


def state_after_a_chunk():
    """The step from t − 1 to t for any size (before the first token both sides are S_0), then the code."""
    equal((1 - b * kT * k) * STATE + b * kT * v, STATE + kT * (u - w * S0), "induction step")
    for p in problems():
        for name, wy in factors(p):
            equal(p.S0 + p.k.T @ (wy.U - wy.W @ p.S0), exact.recurrence(*p).S, f"{name}, C={len(p.k)}")
        equal(exact.chunk(*p).S, exact.recurrence(*p).S, f"exact.chunk, C={len(p.k)}")


def outputs_of_a_chunk():
    """Reading (4.3) with q at each token; the triangle keeps what was written up to it."""
    e, = words("e")
    equal(q * (STATE + kT * e), q * S0 + (q * KT) * (U - W * S0) + (q * kT) * e, "one row, any size")
    for p in problems():
        for name, wy in factors(p):
            O = p.q @ p.S0 + np.tril(p.q @ p.k.T) @ (wy.U - wy.W @ p.S0)
            equal(O, exact.recurrence(*p).O, f"{name}, C={len(p.k)}")
        equal(exact.chunk(*p).O, exact.recurrence(*p).O, f"exact.chunk, C={len(p.k)}")


IDENTITIES = [
    Identity("4.1", "(I + L)U = diag(β)V", triangular_system),
    Identity("4.2", "row t of U − W S_0 is β_t(v_t − k_t S_{t−1})", pseudo_value_is_the_delta),
    Identity("4.3", "S_C = S_0 + Kᵀ(U − W S_0)", state_after_a_chunk),
    Identity("4.4", "O = Q S_0 + tril(QKᵀ)(U − W S_0)", outputs_of_a_chunk),
]
