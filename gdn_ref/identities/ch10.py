"""Chapter 10, affine maps compose.  A run of tokens is S ↦ A S + B, whatever S is.

In words a is this token's α, c the decay γ_{t−1} before it, D = diag(γ_{t−1}/γ_j) over the rows before it, as in
chapter 5.  A matrix of one word, [1, 1], lets ``exact.compose`` itself run on matrices of any size.
"""

import numpy as np
import sympy as sp

from .. import exact
from .algebra import Identity, differ, entries, equal, holds, identity, rational, scalars, words
from .ch05 import problems

a, c = scalars("α γ", positive=True)
b, = scalars("β")
k, kT, v, KT, W, U, S0, D, A, B = words("k kᵀ v Kᵀ W U S₀ D A B")

H = 1 - b * kT * k


def words_map(index):
    """An Affine of two words A_i, B_i, each standing for a matrix of any size."""
    A_i, B_i = words(f"A_{index} B_{index}")
    return exact.Affine(np.array([[A_i]], dtype=object), np.array([[B_i]], dtype=object))


def same_map(found, wanted, where):
    """Both parts of two Affines."""
    equal(found.A, wanted.A, f"A, {where}")
    equal(found.B, wanted.B, f"B, {where}")


def product_of_steps(p):
    """Π α_t H_t, [K, K], the newest on the left."""
    P = identity(p.k.shape[1])
    for t in range(len(p.k)):
        P = p.alpha[t] * (identity(len(P)) - p.beta[t] * np.outer(p.k[t], p.k[t])) @ P
    return P


def cut(p, first, last):
    """k, v, α, β of some of a problem's tokens, the arguments of ``exact.chunk_map``."""
    return [x[first:last] for x in (p.k, p.v, p.alpha, p.beta)]


def prefixes_one_by_one(maps):
    """m_1, m_2∘m_1, …, each from the one before."""
    found = maps[:1]
    for m in maps[1:]:
        found.append(exact.compose(m, found[-1]))
    return found


def chunk_is_an_affine_map():
    """Sorting (5.6) by S_0, and that A gains a factor αH a token, in words; then ``exact.chunk_map``."""
    before = c - KT * D * W
    equal(c * S0 + KT * D * (U - W * S0), before * S0 + KT * D * U, "sorted by S_0, any size")
    row = b * (a * c * k - k * (a * KT * D * W))      # the new row of W, (5.3)
    equal(a * H * before, a * c - KT * (a * D) * W - kT * row, "one more factor, any size")
    for p in problems():
        m = exact.chunk_map(*cut(p, 0, None))
        equal(m.A, product_of_steps(p), f"A, C={len(p.k)}")
        equal(exact.apply(m, p.S0), exact.recurrence(*p).S, f"C={len(p.k)}")


def runs_in_succession():
    """For any size through ``exact.compose``; then two runs of each problem against one, cut at every place."""
    first, second = words_map(1), words_map(2)
    S = np.array([[S0]], dtype=object)
    equal(exact.apply(exact.compose(second, first), S), exact.apply(second, exact.apply(first, S)), "any size")
    for p in problems():
        whole = exact.chunk_map(*cut(p, 0, None))
        for at in range(len(p.k) + 1):
            joined = exact.compose(exact.chunk_map(*cut(p, at, None)), exact.chunk_map(*cut(p, 0, at)))
            same_map(joined, whole, f"cut at {at}")


def associative_with_unit():
    """Any size by words, through ``exact.compose``."""
    x, y, z = (words_map(i) for i in (1, 2, 3))
    same_map(exact.compose(z, exact.compose(y, x)), exact.compose(exact.compose(z, y), x), "any size")
    unit = exact.identity_map(1, 1)
    same_map(exact.compose(x, unit), x, "unit on the right")
    same_map(exact.compose(unit, x), x, "unit on the left")


def scan_gives_every_prefix():
    """``exact.scan`` on up to 9 maps of words; the number of compositions; then maps made of Fractions."""
    done = []

    def counted(later, earlier):
        done.append(1)
        return exact.compose(later, earlier)

    for n in range(1, 10):
        maps = [words_map(i) for i in range(n)]
        done.clear()
        found = exact.scan(maps, counted)
        for i, (prefix, wanted) in enumerate(zip(found, prefixes_one_by_one(maps), strict=True)):
            same_map(prefix, wanted, f"prefix {i} of {n}")
        holds(len(done) <= 2 * n, "at most 2n compositions")
    p = rational(12, 3, 2)
    maps = [exact.chunk_map(*cut(p, i, i + 2)) for i in range(0, 12, 2)]
    for i, prefix in enumerate(exact.scan(maps)):
        equal(exact.apply(prefix, p.S0), exact.recurrence(*(x[:2 * i + 2] for x in p[:5]), p.S0).S, f"chunk {i}")


def rule_yields_its_own_map():
    """One step for any size, (1.1) on each block of columns; then ``exact.segment_map`` in three chunk sizes."""
    step = exact.Affine(np.array([[a * H]], dtype=object), np.array([[b * kT * v]], dtype=object))
    after = exact.compose(step, exact.Affine(*(np.array([[x]], dtype=object) for x in (A, B))))
    equal(a * B + b * kT * (v - k * a * B), after.B[0, 0], "the columns of V, any size")
    equal(a * A + b * kT * (0 - k * a * A), after.A[0, 0], "the columns of I, where no value is written, any size")
    for p in problems():
        wanted = exact.chunk_map(*cut(p, 0, None))
        for size in (1, 2, 5):
            same_map(exact.segment_map(*cut(p, 0, None), chunk_size=size), wanted, f"C={len(p.k)}, chunks of {size}")


def segments_in_parallel():
    """``exact.parallel`` on Fractions, resets and repeated keys among them, for six segment lengths."""
    for T, K, V in ((7, 2, 3), (13, 4, 2)):
        p = rational(T, K, V)
        right = exact.recurrence(*p)
        for size in (1, 2, 3, 5, 8, 16):
            found = exact.parallel(*p, segment_size=size, chunk_size=3)
            equal(found.O, right.O, f"O, T={T}, segments of {size}")
            equal(found.S, right.S, f"S, T={T}, segments of {size}")


def steps_are_contractions():
    """HᵀH in words with k kᵀ = n; what is subtracted is a square times m(2 − m)/n for β‖k‖² = m in [0, 2]."""
    n, = scalars("n", positive=True)
    x, xT = words("x xᵀ")
    square = sp.expand(a**2 * xT * sp.expand(H * H).subs(k * kT, n) * x)
    equal(square, a**2 * (xT * x - b * (2 - b * n) * xT * kT * k * x), "any size")
    s, = scalars("s", nonnegative=True)
    m = 2 / (1 + s)                                   # all of (0, 2]
    holds(sp.together((b * (2 - b * n)).subs(b, m / n)).is_nonnegative, "what is subtracted is not negative")
    equal((b * (2 - b * n)).subs(b, 0), sp.S.Zero, "nothing is written, nothing is subtracted")
    keys, y = entries("k", 3), entries("y", 3)
    Hy = y - b * keys * (keys @ y)
    equal(Hy @ Hy, y @ y - b * (2 - b * (keys @ keys)) * (keys @ y) ** 2, "K=3")


def warm_up_is_wrong():
    """What a run from zero leaves out is A S_0, for any size; with keys orthogonal to a fact in S_0 it is all of it.

    The decay is then the only limit: γ times the fact is missing, and with α = 1 the whole fact.
    """
    whole = exact.apply(words_map(1), np.array([[S0]], dtype=object))
    warm = exact.apply(words_map(1), np.array([[sp.S.Zero]], dtype=object))
    equal(whole - warm, np.array([[words("A_1")[0] * S0]], dtype=object), "residual, any size")
    keys, alpha, beta = entries("k", 3, 3), entries("α", 3, positive=True), entries("β", 3)
    keys[:, 0] = 0                                    # the warm-up's keys leave the first direction alone
    m = exact.chunk_map(keys, entries("v", 3, 1), alpha, beta)
    equal(m.A[0], np.prod(alpha) * identity(3)[0], "the first direction is only decayed")
    return differ(exact.apply(m, entries("S", 3, 1)), m.B)


def joined_factors():
    """W₂ meets the memory that the first part left, A₁S₀ + B₁; then two chunks of ``exact.wy_solve`` against one."""
    W1, U1, W2, U2, A1, B1 = words("W₁ U₁ W₂ U₂ A₁ B₁")
    equal(U2 - W2 * (A1 * S0 + B1), (U2 - W2 * B1) - (W2 * A1) * S0, "any size")
    for p in problems():
        whole = exact.wy_solve(*cut(p, 0, None))
        for at in range(1, len(p.k)):
            first, second = exact.wy_solve(*cut(p, 0, at)), exact.wy_solve(*cut(p, at, None))
            m = exact.chunk_map(*cut(p, 0, at))
            equal(np.concatenate([first.W, second.W @ m.A]), whole.W, f"W, cut at {at}")
            equal(np.concatenate([first.U, second.U - second.W @ m.B]), whole.U, f"U, cut at {at}")


IDENTITIES = [
    Identity("10.1", "S_C = A S_0 + B  with  A = γ_C I − (diag(γ_C/γ)K)ᵀW = γ_C P_C,  B = (diag(γ_C/γ)K)ᵀU",
             chunk_is_an_affine_map),
    Identity("10.2", "(A₂, B₂)∘(A₁, B₁) = (A₂A₁, A₂B₁ + B₂) is the map of two runs in succession", runs_in_succession),
    Identity("10.3", "composition is associative, and (I, 0) is its unit", associative_with_unit),
    Identity("10.4", "a scan by pairs gives every prefix m_i∘ … ∘m_1", scan_gives_every_prefix),
    Identity("10.5", "the rule run on [V | 0] from [0 | I] ends in [B | A]", rule_yields_its_own_map),
    Identity("10.6", "segments, each on its own processor = token by token, exactly", segments_in_parallel),
    Identity("10.7", "‖αHx‖² = α²(‖x‖² − β(2 − β‖k‖²)(kx)²)  ⇒  ‖A‖ ≤ γ_C while 0 ≤ β‖k‖² ≤ 2", steps_are_contractions),
    Identity("10.8", "S_T = B  (a warm-up from zero in place of the incoming state)", warm_up_is_wrong, refuted=True),
    Identity("10.9", "two chunks joined: W = [W₁; W₂A₁],  U = [U₁; U₂ − W₂B₁]", joined_factors),
]
