"""Chapter 11, serving.  What padding, packing, grouped heads, pools and drafts do to a memory.

In words S is the memory, a, b this token's α, β; n stands for ‖k‖² = k kᵀ.
"""

import numpy as np
import sympy as sp

from .. import exact
from .algebra import Identity, Problem, differ, entries, equal, identity, rational, scalars, symbolic, words
from .ch04 import states
from .ch05 import problems

a, = scalars("α", positive=True)
b, = scalars("β")
n, = scalars("n", positive=True)
k, kT, v, vT, S, ST = words("k kᵀ v vᵀ S Sᵀ")


def step(memory, alpha, beta):
    """The rule for any size, (1.1)."""
    return alpha * memory + beta * kT * (v - k * alpha * memory)


def join(*parts):
    """Several problems' tokens in a row, with the first one's memory."""
    return Problem(*(np.concatenate(x) for x in zip(*(p[:5] for p in parts), strict=True)), parts[0].S0)


def part(p, first, last, S0):
    """Tokens first to last of a problem, from another memory."""
    return Problem(*(x[first:last] for x in p[:5]), S0)


def padding_is_the_identity():
    """β = 0, α = 1 for any size; then such tokens, their q, k, v arbitrary, put in at every place of a chunk."""
    equal(step(S, 1, 0), S, "any size")
    for p in problems():
        right, (T, K), V = exact.recurrence(*p), p.k.shape, p.v.shape[1]
        pad = rational(3, K, V, seed=1)._replace(alpha=identity(3)[0] * 0 + 1, beta=identity(3)[0] * 0)
        for at in (0, T // 2, T):
            found = exact.chunk(*join(part(p, 0, at, p.S0), pad, part(p, at, T, p.S0)))
            equal(np.concatenate([found.O[:at], found.O[at + 3:]]), right.O, f"O, padded at {at} of {T}")
            equal(found.S, right.S, f"S, padded at {at} of {T}")
    unit = exact.identity_map(K, V)
    padded = exact.chunk_map(pad.k, pad.v, pad.alpha, pad.beta)
    equal(padded.A, unit.A, "the map's A")
    equal(padded.B, unit.B, "the map's B")


def packed_sequences_are_apart():
    """α = 0 for any size leaves no S; then three sequences in a row, in chunks that lie across their borders."""
    equal(step(S, 0, b), b * kT * v, "any size: nothing of S is left")
    parts = [rational(T, 3, 2, seed=T) for T in (5, 1, 6)]
    for p in parts:
        p.alpha[0] = p.alpha[0] * 0
    alone = [exact.recurrence(*p[:5]) for p in parts]
    for size in (1, 2, 4, 12):
        packed = exact.chunkwise(*join(*parts), chunk_size=size)
        equal(packed.O, np.concatenate([one.O for one in alone]), f"O, chunks of {size}")
        equal(packed.S, alone[-1].S, f"S, chunks of {size}")


def side_by_side(p, other):
    """Two problems' values and memories in one, with the first one's q, k and gates."""
    return p._replace(v=np.concatenate([p.v, other.v], axis=1), S0=np.concatenate([p.S0, other.S0], axis=1))


def columns_do_not_mix():
    """Two value heads with the same q, k, α, β: run side by side, token by token and as a chunk, or each alone."""
    for T, K, V in ((2, 2, 1), (5, 3, 2), (12, 4, 3)):
        p = symbolic(T, K, V) if T == 2 else rational(T, K, V)
        other = rational(T, K, V + 1, seed=1)
        one, two = exact.recurrence(*p), exact.recurrence(*p[:2], other.v, *p[3:5], other.S0)
        for form in (exact.recurrence, exact.chunk):
            both = form(*side_by_side(p, other))
            equal(both.O, np.concatenate([one.O, two.O], axis=1), f"O, {form.__name__}, T={T}")
            equal(both.S, np.concatenate([one.S, two.S], axis=1), f"S, {form.__name__}, T={T}")


def one_memory_for_a_group_is_wrong():
    """The group's second head has gates of its own.  Right when they are the first one's, wrong when α or β differs."""
    p, other = symbolic(2, 1, 1), symbolic(2, 1, 1)
    other = other._replace(v=entries("w", 2, 1), S0=entries("R", 1, 1))
    merged = exact.recurrence(*side_by_side(p, other)).O[:, 1:]
    equal(merged, exact.recurrence(*other).O, "the same gates")
    differ(merged, exact.recurrence(*other._replace(alpha=entries("a", 2))).O, "another α")
    return differ(merged, exact.recurrence(*other._replace(beta=entries("b", 2))).O, "another β")


def transposed(expression):
    """The transpose of an expression in words: in every term the partners of its factors, in reverse order."""
    partner = {k: kT, kT: k, v: vT, vT: v, S: ST, ST: S}
    found = sp.S.Zero
    for term in sp.Add.make_args(sp.expand(expression)):
        numbers, factors = term.args_cnc()
        found += sp.Mul(*numbers, *(partner[x] for x in reversed(factors)))
    return found


def pool_holds_the_transpose():
    """The rule transposed, for any size; then a run whose memory [V, K] is only ever a pool's slot."""
    error = vT - a * ST * kT
    equal(transposed(step(S, a, b)), a * ST + b * error * k, "any size")
    for p in problems():
        slot = p.S0.T                                 # [V, K]
        for t in range(len(p.k)):
            error = p.v[t] - p.alpha[t] * (slot @ p.k[t])                                # [V]
            slot = p.alpha[t] * slot + p.beta[t] * np.outer(error, p.k[t])
            equal(slot @ p.q[t], exact.recurrence(*(x[:t + 1] for x in p[:5]), p.S0).O[t], f"o, token {t}")
        equal(slot.T, exact.recurrence(*p).S, f"S, T={len(p.k)}")


def prefill_then_decode():
    """A prompt by chunks, then token by token from its memory; against all of it by chunks.  Every place to change."""
    for p in (symbolic(2, 2, 1), rational(7, 2, 3), rational(12, 4, 3)):
        T = len(p.k)
        whole = exact.chunkwise(*p, chunk_size=5)
        for at in range(T + 1):
            prompt = exact.chunkwise(*part(p, 0, at, p.S0), chunk_size=3)
            answer = exact.recurrence(*part(p, at, T, prompt.S))
            equal(np.concatenate([prompt.O, answer.O]), whole.O, f"O, T={T}, changed at {at}")
            equal(answer.S, whole.S, f"S, T={T}, changed at {at}")


def memory_after_each_draft():
    """The deltas E of all T drafts at once; the first n rows are those of n drafts alone, and give S_n by (5.6)."""
    for p in problems():
        E = exact.chunk_delta(exact.wy_solve(p.k, p.v, p.alpha, p.beta), p.S0)
        after = states(p)
        for m in range(1, len(p.k) + 1):
            gamma, Gamma = exact.decay(p.alpha[:m])
            first = exact.chunk_delta(exact.wy_solve(p.k[:m], p.v[:m], p.alpha[:m], p.beta[:m]), p.S0)
            equal(first, E[:m], f"E, {m} of {len(p.k)}")
            equal(exact.chunk_state(p.k[:m], gamma, Gamma, E[:m], p.S0), after[m], f"S, {m} of {len(p.k)}")


def undo(k, v, alpha, beta, S):
    """S_{t−1} from S_t, one token; divides by α and by 1 − β‖k‖².  k [K]; v [V]; S [K, V]."""
    rest = S - beta * np.outer(k, v)
    return (rest + beta * np.outer(k, k @ rest) / (1 - beta * (k @ k))) / alpha


def a_token_undone():
    """H⁻¹ for any size, multiplied by 1 − βn so that nothing is divided; a token of symbols undone; where it ends."""
    H = 1 - b * kT * k
    for product in (H * (1 - b * n + b * kT * k), (1 - b * n + b * kT * k) * H):
        equal(sp.expand(product).subs(k * kT, n), 1 - b * n, "any size")
    p = symbolic(1, 2, 1)
    token = p.k[0], p.v[0], p.alpha[0], p.beta[0]
    equal(undo(*token, exact.step(p.q[0], *token, p.S0)[1]), p.S0, "one token")
    other = p.S0 + np.outer(p.k[0], entries("x", 1))                # differs only in what k reads
    whole = token[:3] + (1 / (p.k[0] @ p.k[0]),)
    equal(exact.step(p.q[0], *whole, other)[1], exact.step(p.q[0], *whole, p.S0)[1], "β‖k‖² = 1: two into one")


def rejected_drafts_left_in():
    """From S' ≠ S_0 all later memories are off by A(S' − S_0), A the map of the tokens since; then one draft."""
    A, B, right, wrong = words("A B S₀ S'")
    equal((A * wrong + B) - (A * right + B), A * (wrong - right), "residual, any size")
    p = symbolic(2, 1, 1)
    accepted = exact.recurrence(*part(p, 1, 2, p.S0))
    return differ(exact.recurrence(*p).S, accepted.S)


IDENTITIES = [
    Identity("11.1", "β = 0, α = 1 is the identity: padding changes neither S nor any other token's o",
             padding_is_the_identity),
    Identity("11.2", "α = 0 at each first token: packed sequences = each alone from an empty memory",
             packed_sequences_are_apart),
    Identity("11.3", "with the same q, k, α, β the value columns do not mix: [V₁ | V₂] gives [O₁ | O₂]",
             columns_do_not_mix),
    Identity("11.4", "one memory for all value heads of a key head  (their gates differ)",
             one_memory_for_a_group_is_wrong, refuted=True),
    Identity("11.5", "Sᵀ_t = αSᵀ_{t−1} + β(vᵀ − αSᵀ_{t−1}kᵀ)k  and  oᵀ = Sᵀqᵀ", pool_holds_the_transpose),
    Identity("11.6", "prefill, then decode = prefill of all, wherever the change is made", prefill_then_decode),
    Identity("11.7", "S_n = γ_n S_0 + (diag(γ_n/γ)K)ᵀE over the first n tokens, E of all drafts at once",
             memory_after_each_draft),
    Identity("11.8", "S_{t−1} = α⁻¹(I + βkᵀk/(1 − β‖k‖²))(S_t − βkᵀv)  if α ≠ 0 and β‖k‖² ≠ 1", a_token_undone),
    Identity("11.9", "rejected drafts may stay in the memory, as the right tokens overwrite them",
             rejected_drafts_left_in, refuted=True),
]
