"""exact.py: over the rationals every form is the recurrence, exactly."""

import ast
import inspect
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gdn_ref import exact
from gdn_ref.identities.algebra import Problem, equal, rational, symbolic

property_test = settings(max_examples=50, deadline=None, derandomize=True, database=None,
                         suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def numbers(low, high, *often):
    """Small rationals in [low, high], some of them more often than chance would have it."""
    plain = st.fractions(low, high, max_denominator=4)
    return st.one_of(st.sampled_from([Fraction(x) for x in often]), plain) if often else plain


def arrays(draw, of, *shape):
    """An object array [*shape] of what ``of`` draws."""
    array = np.empty(shape, dtype=object)
    for index in np.ndindex(*shape):
        array[index] = draw(of)
    return array


@st.composite
def problems(draw, min_tokens=0, max_tokens=9):
    """Any T, K, V; alpha 0 and 1, beta 0, 1, 2, repeated and zero keys, an initial state."""
    T = draw(st.integers(min_tokens, max_tokens))
    K, V = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    entry = numbers(-2, 2)
    different = arrays(draw, entry, draw(st.integers(1, 3)), K)
    different[-1] = draw(st.sampled_from([different[-1], np.array([Fraction(0)] * K, dtype=object)]))
    k = different[[draw(st.integers(0, len(different) - 1)) for _ in range(T)]].reshape(T, K)
    return Problem(arrays(draw, entry, T, K), k, arrays(draw, entry, T, V), arrays(draw, numbers(0, 1, 0, 1), T),
                   arrays(draw, numbers(0, 2, 0, 1, 2), T), arrays(draw, entry, K, V))


def same(found, wanted):
    """Equal in every entry, and no float among them."""
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype == object
        assert (a == b).all()
        assert all(isinstance(x, (int, Fraction)) for x in a.ravel())


@property_test
@given(problems(), st.integers(1, 12))
def test_chunkwise_is_the_recurrence(p, chunk_size):
    same(exact.chunkwise(*p, chunk_size=chunk_size), exact.recurrence(*p))


@property_test
@given(problems())
def test_one_chunk_is_the_recurrence(p):
    same(exact.chunk(*p), exact.recurrence(*p))


@property_test
@given(problems())
def test_recursion_is_solve(p):
    arguments = p.k, p.v, p.alpha, p.beta
    same(exact.wy_recursion(*arguments), exact.wy_solve(*arguments))


@property_test
@given(problems(), st.integers(0, 9), st.integers(1, 4), st.integers(1, 4))
def test_split_anywhere_with_any_chunk_sizes(p, at, first_size, second_size):
    first = exact.chunkwise(*(x[:at] for x in p[:5]), p.S0, chunk_size=first_size)
    second = exact.chunkwise(*(x[at:] for x in p[:5]), first.S, chunk_size=second_size)
    same((np.concatenate([first.O, second.O]), second.S), exact.recurrence(*p))


@property_test
@given(problems())
def test_definition_by_matrices(p):
    """Against S = α(I − βkᵀk)S + βkᵀv, with plain loops over the entries and nothing of exact.py."""
    S = [list(row) for row in p.S0]
    K, V = p.S0.shape
    for t in range(len(p.k)):
        H = [[(i == j) - p.beta[t] * p.k[t, i] * p.k[t, j] for j in range(K)] for i in range(K)]
        S = [[p.alpha[t] * sum(H[i][m] * S[m][j] for m in range(K)) + p.beta[t] * p.k[t, i] * p.v[t, j]
              for j in range(V)] for i in range(K)]
    assert (exact.recurrence(*p).S == np.array(S, dtype=object)).all()


@property_test
@given(problems())
def test_decay_is_a_product(p):
    gamma, Gamma = exact.decay(p.alpha)
    for i in range(len(gamma)):
        assert gamma[i] == np.prod(p.alpha[:i + 1])
        for j in range(len(gamma)):
            assert Gamma[i, j] == (np.prod(p.alpha[j + 1:i + 1]) if j <= i else 0)


@property_test
@given(problems(min_tokens=1))
def test_zero_alpha_forgets_all_before(p):
    at = len(p.k) // 2
    p.alpha[at] = Fraction(0)
    late = exact.chunk(*(x[at:] for x in p[:5]), p.S0 * 0)
    whole = exact.chunk(*p)
    same((whole.O[at:], whole.S), late)


@property_test
@given(problems(), st.integers(1, 12))
def test_float64_agrees(p, chunk_size):
    p = p._replace(k=p.k / (2 * p.k.shape[1]))  # β‖k‖² ≤ 2, so that the recurrence itself doesn't amplify rounding
    floats = Problem(*(x.astype(np.float64) for x in p))
    wanted = exact.recurrence(*p)
    for found in (exact.recurrence(*floats), exact.chunkwise(*floats, chunk_size=chunk_size)):
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == np.float64
            np.testing.assert_allclose(a, b.astype(np.float64), rtol=1e-11, atol=1e-11)


def test_longer_rational_run():
    p = rational(40, 5, 4)
    for chunk_size in (7, 16, 64):
        same(exact.chunkwise(*p, chunk_size=chunk_size), exact.recurrence(*p))


def test_symbols_run_through_the_same_lines():
    p = symbolic(2, 2, 2)
    equal(exact.chunkwise(*p, chunk_size=1).S, exact.recurrence(*p).S)
    equal(exact.chunkwise(*p, chunk_size=2).O, exact.recurrence(*p).O)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, object])
@pytest.mark.parametrize("form", [exact.recurrence, exact.chunk, exact.chunkwise])
def test_no_tokens(form, dtype):
    S0 = np.arange(6).reshape(2, 3).astype(dtype)
    O, S = form(*(np.zeros(s, dtype) for s in ((0, 2), (0, 2), (0, 3), (0,), (0,))), S0)
    assert O.shape == (0, 3) and (S == S0).all()
    assert O.dtype == S.dtype == dtype


@pytest.mark.parametrize("form", [exact.recurrence, exact.chunk, exact.chunkwise])
def test_nothing_given_is_changed(form):
    p = rational(6, 3, 2)
    before = [x.copy() for x in p]
    O, S = form(*p)
    O[...], S[...] = 7, 7
    assert all((x == y).all() for x, y in zip(p, before, strict=True))


@pytest.mark.parametrize("form", [exact.recurrence, exact.chunk, exact.chunkwise])
def test_no_state_is_a_zero_state(form):
    p = rational(6, 3, 2)
    same(form(*p[:5]), form(*p[:5], p.S0 * 0))


@pytest.mark.parametrize("name, shape", [
    ("q", (5, 2)), ("k", (5,)), ("v", (4, 2)), ("alpha", (4,)), ("beta", (5, 1)), ("S0", (2, 3))])
def test_a_wrong_shape_is_named(name, shape):
    p = rational(5, 3, 2)._replace(**{name: np.ones(shape)})
    for form in (exact.recurrence, exact.chunk, exact.chunkwise):
        with pytest.raises(ValueError, match=f"^{name}: found "):
            form(*p)


def test_chunk_size_below_one():
    with pytest.raises(ValueError, match="^chunk_size: found 0, expected"):
        exact.chunkwise(*rational(5, 3, 2), chunk_size=0)


def test_no_float_no_exp_no_division_in_the_source():
    """What lets every scalar type through."""
    forbidden = {"exp", "exp2", "log", "divide", "reciprocal", "inv"}
    for node in ast.walk(ast.parse(inspect.getsource(exact))):
        assert not (isinstance(node, ast.Constant) and isinstance(node.value, float)), node.lineno
        assert not isinstance(node, (ast.Div, ast.FloorDiv))
        assert not (isinstance(node, ast.Attribute) and node.attr in forbidden)
