"""The list of identities: complete, in order, each carried out; and a wrong one is caught."""

from fractions import Fraction

import numpy as np
import pytest
import sympy as sp

from gdn_ref import exact, identities
from gdn_ref.identities import IDENTITIES, Identity, ProofError, algebra, ch03, ch07, ch09, check, get, prove

# How many tags each chapter has for good; later ones may follow, none may move.
FIXED = {1: 5, 2: 5, 3: 6, 4: 4, 5: 8, 6: 8, 7: 7, 8: 14, 9: 17, 10: 9, 11: 9, 12: 5, 13: 4}
REFUTED = {"1.5", "3.6", "5.7", "5.8", "7.7", "8.11", "8.12", "9.16", "9.17", "10.8", "11.4", "11.9",
           "12.2", "13.4"}
TAGS = [identity.tag for identity in IDENTITIES]


# ---- the list --------------------------------------------------------------------------------------------------------


def test_tags_are_complete_unique_and_in_order():
    assert len(set(TAGS)) == len(TAGS)
    for chapter, count in FIXED.items():
        numbers = [int(i.tag.partition(".")[2]) for i in IDENTITIES if i.chapter == chapter]
        assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) >= count
    assert [i.chapter for i in IDENTITIES] == sorted(i.chapter for i in IDENTITIES)


def test_refuted_ones_are_marked():
    assert {i.tag for i in IDENTITIES if i.refuted} == REFUTED


def test_statements_are_one_readable_line():
    for identity in IDENTITIES:
        assert identity.statement.strip() == identity.statement and "\n" not in identity.statement
        assert 5 < len(identity.statement) <= 110
    assert len({i.statement for i in IDENTITIES}) == len(IDENTITIES)


def test_get():
    assert get("5.4") is get("(5.4)") and get("5.4").chapter == 5
    with pytest.raises(KeyError, match="found '5.99', expected one of 5.1, 5.2"):
        get("5.99")
    with pytest.raises(KeyError, match="expected one of 1.1"):
        get("nonsense")


@pytest.mark.parametrize("tag", TAGS)
def test_identity(tag):
    result = prove(tag)
    assert result.ok and result.refuted == (tag in REFUTED)
    assert bool(result.residual) == result.refuted
    assert result.verdict == ("refuted, as it should be" if result.refuted else "proved")


def test_residuals_of_the_refuted():
    assert prove("3.6").residual == "β·(W·Kᵀ − K·Wᵀ)·k·kᵀ"
    assert "α_1 - 1" in prove("5.7").residual
    assert "NaN" in prove("7.7").residual
    assert "S_00*α_0*α_1*α_2" in prove("10.8").residual


def test_residuals_of_wrong_gradients():
    assert prove("8.11").residual.startswith("entry [0, 0]: S_00*k_00*α_0*β_0")
    assert prove("8.12").residual.startswith("entry [0]: S_00*k_00**2*α_0*β_0")
    assert prove("9.16").residual == "entry [1, 0]: L_10*(d_00 + d_11)"
    assert "ten times dg" in prove("9.17").residual


def test_residuals_are_the_same_every_time():
    assert prove("5.8").residual == prove("5.8").residual


# ---- a wrong one is caught -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", [t for t in TAGS if t not in REFUTED])
def test_a_proof_rests_on_its_comparison(tag, monkeypatch):
    """If every comparison leaves something over, no proof may go through."""
    monkeypatch.setattr(algebra, "residuals", lambda lhs, rhs: {(): sp.Symbol("left_over")})
    with pytest.raises(ProofError, match="left_over"):
        prove(tag)


@pytest.mark.parametrize("tag", sorted(REFUTED - {"7.7", "9.17"}))
def test_a_refutation_rests_on_its_residual(tag, monkeypatch):
    monkeypatch.setattr(algebra, "residuals", lambda lhs, rhs: {})
    with pytest.raises(ProofError, match="not refuted"):
        prove(tag)


def test_7_7_fails_if_the_quotient_form_were_right(monkeypatch):
    monkeypatch.setattr(ch07, "quotient_form", exact.chunk)
    with pytest.raises(ProofError, match="wrong by a tenth"):
        prove("7.7")


def test_9_17_fails_if_the_difference_of_sums_were_exact_enough(monkeypatch):
    monkeypatch.setattr(ch09, "by_differences", exact.decay_backward)
    with pytest.raises(ProofError, match="off by ten times"):
        prove("9.17")


def forget_last(q, k, v, alpha, beta, S):
    S = alpha * S + beta * np.outer(k, v - k @ S)
    return q @ S, S


def swapped_recursion(k, v, alpha, beta):
    return exact.WY(ch03.swapped_recursion(k, beta), v)


def undecayed_output(q, k, gamma, Gamma, E, S0):
    return gamma[:, None] * (q @ S0) + np.tril(q @ k.T) @ E


def undecayed_state(k, gamma, Gamma, E, S0):
    return gamma[-1] * S0 + k.T @ E


def undecayed_kkt(k, beta, Gamma):
    return np.tril(beta[:, None] * (k @ k.T), -1)


def undecayed_w(k, v, beta, A, gamma):
    return exact.WY(A @ (beta[:, None] * k), A @ (beta[:, None] * v))


def one_decay_too_many(alpha):
    return exact.Decay(np.cumprod(alpha), DECAY(alpha).Gamma * alpha[None, :])


def one_pass(N, R):
    return R - N @ R


def jacobi_inverse(N):
    return np.eye(len(N), dtype=object) - N


def wrong_sign_of_delta(wy, S0):
    return wy.U + wy.W @ S0


def earlier_on_the_left(later, earlier):
    return exact.Affine(earlier.A @ later.A, earlier.A @ later.B + earlier.B)


def undecayed_map(k, v, alpha, beta):
    W, U = exact.wy_solve(k, v, alpha, beta)
    return exact.Affine(np.eye(k.shape[1], dtype=object) - k.T @ W, k.T @ U)


def last_one_left_out(maps, combine=exact.compose):
    return maps[:1] + [combine(maps[i], maps[i - 1]) for i in range(1, len(maps))]


def warm_up_only(m, S):
    return m.B + 0 * S


def no_reflection(k, alpha, beta, Lambda):
    return alpha * Lambda


def writing_key_only(k, v, alpha, beta, do, S, S_after, Lambda):
    dq, dk, *rest = TOKEN_BACKWARD(k, v, alpha, beta, do, S, S_after, Lambda)
    return dq, beta * (Lambda @ (v - alpha * (k @ S))), *rest


def state_before_the_write(k, v, alpha, beta, do, S, S_after, Lambda):
    return S @ do, *TOKEN_BACKWARD(k, v, alpha, beta, do, S, S_after, Lambda)[1:]


def undecayed_memory(k, v, alpha, beta, do, S, S_after, Lambda):
    *others, dg, dbeta = TOKEN_BACKWARD(k, v, alpha, beta, do, S, S_after, Lambda)
    return *others, np.sum(Lambda), dbeta


def adjoints_of_all(q, k, alpha, beta, dO, dS):
    return exact.states(q, dO, alpha, beta, dS)[1:]            # from the wrong end


def left_inverse(k, beta, Gamma):
    return exact.solve_tril(exact.chunk_scaled_dot_kkt_fwd(k, beta, Gamma))


def outputs_only(q, k, beta, A_r, Gamma, dO, dS):
    return VALUES_BACKWARD(q, k, beta, A_r, Gamma, dO, dS * 0)


def without_what_was_read(q, k, gamma, dO, dV, dS):
    return gamma[-1] * dS + (gamma[:, None] * q).T @ dO


def unmasked_rows(q, k, beta, gamma, Gamma, *rest):
    return ROWS_BACKWARD(q, k, beta, gamma, np.tril(np.ones_like(Gamma)), *rest)


def shares_without_the_end(*chunk):
    X = DECAY_SHARES(*chunk)
    X[-1] = X[-1] * 0
    return X


def shares_with_a_floor(q, k, beta, gamma, Gamma, *rest):
    return DECAY_SHARES(q, k, beta, gamma + 1, Gamma + 1, *rest)    # as a clamp of a decay would have it


def pairs_up_to_the_token(X):
    return np.sum(np.tril(X[:-1]), axis=1)


DECAY = exact.decay
DECAY_SHARES, ROWS_BACKWARD = exact.decay_shares, exact.rows_backward
TOKEN_BACKWARD, VALUES_BACKWARD = exact.token_backward, exact.values_backward
MUTANTS = [
    ("1.1", "step", forget_last),
    ("3.3", "wy_recursion", swapped_recursion),
    ("3.4", "wy_recursion", swapped_recursion),
    ("3.5", "wy_recursion", swapped_recursion),
    ("4.2", "chunk_delta", wrong_sign_of_delta),
    ("4.3", "chunk_delta", wrong_sign_of_delta),
    ("4.4", "chunk_delta", wrong_sign_of_delta),
    ("5.2", "chunk_scaled_dot_kkt_fwd", undecayed_kkt),
    ("5.3", "recompute_w_u_fwd", undecayed_w),
    ("5.4", "recompute_w_u_fwd", undecayed_w),
    ("5.5", "chunk_output", undecayed_output),
    ("5.6", "chunk_state", undecayed_state),
    ("5.9", "chunk_scaled_dot_kkt_fwd", undecayed_kkt),
    ("6.2", "solve_tril", jacobi_inverse),
    ("6.3", "forward_substitution", one_pass),
    ("6.5", "solve_tril", jacobi_inverse),
    ("6.7", "forward_substitution", one_pass),
    ("6.8", "solve_tril", jacobi_inverse),
    ("7.1", "decay", one_decay_too_many),
    ("7.5", "decay", lambda alpha: exact.Decay(np.cumprod(alpha), np.tril(np.ones((len(alpha),) * 2, dtype=object)))),
    ("8.1", "adjoint_before", no_reflection),
    ("8.2", "token_backward", state_before_the_write),
    ("8.3", "adjoint_before", no_reflection),
    ("8.4", "adjoint_before", no_reflection),
    ("8.5", "token_backward", writing_key_only),
    ("8.6", "adjoint_before", no_reflection),
    ("8.7", "token_backward", state_before_the_write),
    ("8.8", "adjoint_before", no_reflection),
    ("8.9", "token_backward", undecayed_memory),
    ("8.10", "adjoints", adjoints_of_all),
    ("9.1", "tril_inverse_backward", lambda T, dT: -np.tril(T @ dT @ T, -1)),
    ("9.2", "tril_inverse_backward", lambda T, dT: -np.tril(T @ dT @ T, -1)),
    ("9.3", "right_inverse", left_inverse),
    ("9.4", "chunk_output", undecayed_output),
    ("9.5", "values_backward", outputs_only),
    ("9.5", "right_inverse", left_inverse),
    ("9.6", "state_backward", without_what_was_read),
    ("9.7", "rows_backward", unmasked_rows),
    ("9.8", "rows_backward", unmasked_rows),
    ("9.9", "rows_backward", unmasked_rows),
    ("9.10", "rows_backward", unmasked_rows),
    ("9.11", "decay_shares", shares_without_the_end),
    ("9.12", "decay_shares", shares_without_the_end),
    ("9.13", "decay_shares", shares_without_the_end),
    ("9.13", "decay_backward", pairs_up_to_the_token),
    ("9.14", "decay_shares", shares_with_a_floor),
    ("9.15", "values_backward", outputs_only),
    ("9.15", "decay_backward", pairs_up_to_the_token),
    ("10.1", "chunk_map", undecayed_map),
    ("10.2", "compose", earlier_on_the_left),
    ("10.2", "chunk_map", undecayed_map),
    ("10.4", "scan", last_one_left_out),
    ("10.5", "segment_map", lambda *arguments, chunk_size: undecayed_map(*arguments)),
    ("10.6", "scan", last_one_left_out),
    ("10.6", "apply", warm_up_only),
    ("10.9", "recompute_w_u_fwd", undecayed_w),
    ("11.1", "chunk_state", undecayed_state),
    ("11.2", "decay", one_decay_too_many),
    ("11.3", "chunk_delta", wrong_sign_of_delta),
    ("11.5", "step", forget_last),
    ("11.6", "chunk_output", undecayed_output),
    ("11.7", "chunk_state", undecayed_state),
    ("11.8", "step", forget_last),
    ("12.1", "right_inverse", left_inverse),
]


@pytest.mark.parametrize("tag, name, mutant", MUTANTS, ids=[f"{tag}-{name}" for tag, name, _ in MUTANTS])
def test_a_fault_in_exact_is_caught(tag, name, mutant, monkeypatch):
    monkeypatch.setattr(exact, name, mutant)
    with pytest.raises(ProofError) as caught:
        prove(tag)
    assert caught.value.residual and f"({tag})" in str(caught.value)
    assert not check(tag).ok


def replace(monkeypatch, tag, proof, refuted=False):
    wrong = Identity(tag, "a mutated statement", proof, refuted)
    monkeypatch.setattr(identities, "IDENTITIES", [wrong if i.tag == tag else i for i in IDENTITIES])


def test_a_wrong_sign_is_shown_with_its_residual(monkeypatch):
    k, kT, X = algebra.words("k kᵀ X")
    b, = algebra.scalars("β")
    replace(monkeypatch, "3.1", lambda: algebra.equal((1 - b * kT * k) * (1 - X), 1 - X - kT * b * (k + k * X)))
    with pytest.raises(ProofError, match=r"\(3.1\) a mutated statement  not proved: .*2\*β\*kᵀ\*k\*X"):
        prove("3.1")


def test_a_proof_that_crashes_is_no_proof(monkeypatch):
    replace(monkeypatch, "3.1", lambda: 1 / 0)
    with pytest.raises(ProofError, match="ZeroDivisionError"):
        prove("3.1")


def test_a_refutation_without_a_residual_is_none(monkeypatch):
    replace(monkeypatch, "3.6", lambda: None, refuted=True)
    with pytest.raises(ProofError, match="must return its residual"):
        prove("3.6")


# ---- deciding --------------------------------------------------------------------------------------------------------

x, y = algebra.scalars("x y", positive=True)


def test_quotients_and_roots_are_decided():
    algebra.equal(1 / x + 1 / y, (x + y) / (x * y))
    algebra.equal(sp.sqrt(x) * sp.sqrt(x), x)
    with pytest.raises(ProofError, match="residual is not zero"):
        algebra.equal(1 / x + 1 / y, 2 / (x + y))


def test_a_trace_may_be_rotated_and_transposed():
    A, AT, B, BT = algebra.words("A Aᵀ B Bᵀ")
    partner = {A: AT, AT: A, B: BT, BT: B}
    assert algebra.transposed(x * A * BT, partner) == x * B * AT
    assert algebra.trace(A * B, partner) == algebra.trace(BT * AT, partner) == algebra.trace(B * A, partner)
    assert algebra.trace(A * A * B, partner) != algebra.trace(A * A * BT, partner)
    assert algebra.gradient(AT * B, A, partner) == B
    assert algebra.gradient(x * AT * A, A, partner) == sp.expand(2 * x * A)
    assert algebra.gradient(BT * A * A, A, partner) == sp.expand(B * AT + AT * B)


def test_dual_numbers_carry_exact_slopes():
    z = algebra.Dual(Fraction(1, 3), 1)
    assert (z * z * z - 2 * z + 1).slope == 3 * Fraction(1, 9) - 2
    assert (1 - z).slope == -1 and (z - z * z).slope == 1 - Fraction(2, 3)
    row = np.array([Fraction(2), Fraction(5)])
    for array in (z * row, row * z, z + row, row - z, z - row):
        assert array.shape == (2,) and all(isinstance(entry, algebra.Dual) for entry in array)
    assert [entry.slope for entry in z * row] == [2, 5]


def test_order_matters_for_words():
    A, B = algebra.words("A B")
    assert algebra.differ(A * B, B * A)
    with pytest.raises(ProofError):
        algebra.equal((A + B) ** 2, A ** 2 + 2 * A * B + B ** 2)


def test_nothing_slips_through():
    with pytest.raises(ProofError, match="shapes"):
        algebra.equal(np.zeros((2, 1), dtype=object), np.zeros((1, 2), dtype=object))
    with pytest.raises(ProofError, match="empty"):
        algebra.equal(np.zeros((0, 2), dtype=object), np.zeros((0, 2), dtype=object))
    with pytest.raises(TypeError, match="float"):
        algebra.equal(0.1 + 0.2, 0.3)
    with pytest.raises(TypeError, match="float"):
        algebra.equal(x + 0.5 - x, sp.Rational(1, 2))
    with pytest.raises(ProofError, match="not established: undecided"):
        algebra.holds(None, "undecided")
    with pytest.raises(ProofError, match="not established: false"):
        algebra.holds(False, "false")
    with pytest.raises(ProofError, match="residual is zero"):
        algebra.differ(x * (y + 1), x * y + x)


def test_rational_problems_are_the_same_every_time_and_in_the_domain():
    p, again = algebra.rational(12, 4, 3), algebra.rational(12, 4, 3)
    assert all((a == b).all() for a, b in zip(p, again, strict=True))
    assert (p.alpha == 0).any() and all(0 <= a <= 1 for a in p.alpha) and all(0 <= b <= 2 for b in p.beta)
    assert (p.k[2] == p.k[1]).all()
    assert all(a > 0 for a in algebra.rational(12, 4, 3, resets=False).alpha)
