"""exact.py: over the rationals every form is the recurrence, exactly."""

import ast
import inspect
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gdn_ref import exact
from gdn_ref.identities.algebra import Dual, Problem, entries, equal, rational, symbolic
from gdn_ref.identities.ch08 import Upstream, by_sympy

property_test = settings(max_examples=50, deadline=None, derandomize=True, database=None,
                         suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


FORMS = [exact.recurrence, exact.chunk, exact.chunkwise, exact.parallel]


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


# ---- chunks as maps --------------------------------------------------------------------------------------------------


def map_of(p, first=0, last=None):
    """chunk_map of some of a problem's tokens."""
    return exact.chunk_map(*(x[first:last] for x in (p.k, p.v, p.alpha, p.beta)))


@st.composite
def maps(draw, count):
    """`count` maps of the same widths, any matrices at all: composition must not rest on how they were made."""
    K, V = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    entry = numbers(-2, 2)
    return [exact.Affine(arrays(draw, entry, K, K), arrays(draw, entry, K, V)) for _ in range(count)]


@property_test
@given(problems())
def test_map_of_a_chunk_gives_its_state(p):
    m = map_of(p)
    same([exact.apply(m, p.S0)], [exact.recurrence(*p).S])
    same([exact.apply(m, p.S0 * 0)], [m.B])


@property_test
@given(problems(), st.integers(0, 9))
def test_maps_of_two_runs_compose_to_the_map_of_both(p, at):
    same(exact.compose(map_of(p, at), map_of(p, 0, at)), map_of(p))


@property_test
@given(maps(3))
def test_composition_is_associative_and_has_a_unit(three):
    x, y, z = three
    same(exact.compose(z, exact.compose(y, x)), exact.compose(exact.compose(z, y), x))
    unit = exact.identity_map(*x.B.shape)
    same(exact.compose(unit, x), x)
    same(exact.compose(x, unit), x)


@property_test
@given(maps(2), st.integers(0, 3))
def test_a_composed_map_applies_the_earlier_one_first(two, column):
    x, y = two
    S = x.B[:, [min(column, x.B.shape[1] - 1)]] * np.ones(x.B.shape[1], dtype=int)
    same([exact.apply(exact.compose(y, x), S)], [exact.apply(y, exact.apply(x, S))])


@property_test
@given(st.lists(st.text(max_size=2), max_size=40))
def test_scan_keeps_the_order_and_is_short(words):
    """Joining of texts is associative and never commutative, so a prefix out of order is seen."""
    done = []
    found = exact.scan(words, lambda later, earlier: done.append(1) or earlier + later)
    assert found == ["".join(words[:i + 1]) for i in range(len(words))]
    assert len(done) <= 2 * len(words)


@property_test
@given(problems(), st.integers(1, 5))
def test_segment_map_is_the_chunk_map(p, chunk_size):
    arguments = p.k, p.v, p.alpha, p.beta
    same(exact.segment_map(*arguments, chunk_size=chunk_size), exact.chunk_map(*arguments))


@property_test
@given(problems(), st.integers(1, 12), st.integers(1, 5))
def test_parallel_is_the_recurrence(p, segment_size, chunk_size):
    same(exact.parallel(*p, segment_size=segment_size, chunk_size=chunk_size), exact.recurrence(*p))


@property_test
@given(problems(min_tokens=2))
def test_parallel_drops_nothing_where_nothing_fades(p):
    """alpha = 1 and keys that leave the first direction alone: the memory's first row must reach the end whole."""
    p.k[:, 0], p.alpha[:] = Fraction(0), Fraction(1)
    O, S = exact.parallel(*p, segment_size=1)
    assert (S[0] == p.S0[0]).all()
    same((O, S), exact.recurrence(*p))


def test_parallel_in_float64_with_slow_gates():
    """4096 tokens in 16 segments, two thirds of the memory left at the end: every segment's state goes all the way."""
    rng = np.random.default_rng(10)
    T, K, V = 4096, 8, 5
    q, k, v = rng.standard_normal((T, K)), rng.standard_normal((T, K)), rng.standard_normal((T, V))
    k[:, 0] = 0
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    alpha, beta = np.exp(rng.uniform(-1.8e-4, 0, T)), rng.uniform(0, 1, T)
    problem = q, k, v, alpha, beta, rng.standard_normal((K, V))
    found, wanted, S0 = exact.parallel(*problem, segment_size=256), exact.recurrence(*problem), problem[5]
    assert np.prod(alpha) > 0.6
    np.testing.assert_allclose(found.O, wanted.O, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(found.S, wanted.S, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(found.S[0], np.prod(alpha) * S0[0], rtol=1e-11)


def test_a_map_of_unit_keys_never_enlarges():
    """(10.7): in the 2-norm |A| <= gamma, so what is rounded in one segment is not blown up by later ones."""
    rng = np.random.default_rng(11)
    for beta in (0.3, 1.0, 2.0):
        k = rng.standard_normal((20, 6))
        k /= np.linalg.norm(k, axis=1, keepdims=True)
        alpha = rng.uniform(0.5, 1, 20)
        A = exact.chunk_map(k, k, alpha, np.full(20, beta)).A
        assert np.linalg.norm(A, 2) <= np.prod(alpha) * (1 + 1e-12)


def test_longer_rational_run():
    p = rational(40, 5, 4)
    for chunk_size in (7, 16, 64):
        same(exact.chunkwise(*p, chunk_size=chunk_size), exact.recurrence(*p))


def test_symbols_run_through_the_same_lines():
    p = symbolic(2, 2, 2)
    equal(exact.chunkwise(*p, chunk_size=1).S, exact.recurrence(*p).S)
    equal(exact.chunkwise(*p, chunk_size=2).O, exact.recurrence(*p).O)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, object])
@pytest.mark.parametrize("form", FORMS)
def test_no_tokens(form, dtype):
    S0 = np.arange(6).reshape(2, 3).astype(dtype)
    O, S = form(*(np.zeros(s, dtype) for s in ((0, 2), (0, 2), (0, 3), (0,), (0,))), S0)
    assert O.shape == (0, 3) and (S == S0).all()
    assert O.dtype == S.dtype == dtype


@pytest.mark.parametrize("form", FORMS)
def test_nothing_given_is_changed(form):
    p = rational(6, 3, 2)
    before = [x.copy() for x in p]
    O, S = form(*p)
    O[...], S[...] = 7, 7
    assert all((x == y).all() for x, y in zip(p, before, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_no_state_is_a_zero_state(form):
    p = rational(6, 3, 2)
    same(form(*p[:5]), form(*p[:5], p.S0 * 0))


@pytest.mark.parametrize("name, shape", [
    ("q", (5, 2)), ("k", (5,)), ("v", (4, 2)), ("alpha", (4,)), ("beta", (5, 1)), ("S0", (2, 3))])
def test_a_wrong_shape_is_named(name, shape):
    p = rational(5, 3, 2)._replace(**{name: np.ones(shape)})
    for form in FORMS:
        with pytest.raises(ValueError, match=f"^{name}: found "):
            form(*p)


def test_size_below_one():
    with pytest.raises(ValueError, match="^chunk_size: found 0, expected"):
        exact.chunkwise(*rational(5, 3, 2), chunk_size=0)
    with pytest.raises(ValueError, match="^segment_size: found 0, expected"):
        exact.parallel(*rational(5, 3, 2), segment_size=0)
    with pytest.raises(ValueError, match="^chunk_size: found 0, expected"):
        exact.chunkwise_backward(*rational(5, 3, 2), chunk_size=0)


# ---- backward --------------------------------------------------------------------------------------------------------

BACKWARD = [exact.recurrence_backward, exact.chunkwise_backward]


@st.composite
def cases(draw, min_tokens=0):
    """A problem and the gradients dO, dS that come from its outputs."""
    p = draw(problems(min_tokens, max_tokens=7))
    return p, arrays(draw, numbers(-2, 2, 0), *p.v.shape), arrays(draw, numbers(-2, 2, 0), *p.S0.shape)


def slope(p, dO, dS, direction):
    """The loss's exact slope along a direction [a Problem], by one run of the recurrence on dual numbers."""
    moved = [np.frompyfunc(Dual, 2, 1)(x, d) for x, d in zip(p, direction, strict=True)]
    O, S = exact.recurrence(*moved)
    return getattr(np.sum(dO * O) + np.sum(dS * S), "slope", 0)


@property_test
@given(cases(), st.integers(1, 9))
def test_chunkwise_backward_is_token_by_token(case, chunk_size):
    p, dO, dS = case
    same(exact.chunkwise_backward(*p, dO, dS, chunk_size=chunk_size), exact.recurrence_backward(*p, dO, dS))


@property_test
@given(cases(), st.data())
def test_gradients_are_the_recurrence_s_own_derivative(case, data):
    """Along any direction, dual numbers against the scalar product with the gradients; α moves by α times g's share."""
    p, dO, dS = case
    direction = Problem(*(arrays(data.draw, numbers(-2, 2), *x.shape) for x in p))
    g = exact.recurrence_backward(*p, dO, dS)
    shares = (g.dq, g.dk, g.dv, g.dg, g.dbeta, g.dS0)
    wanted = sum(np.sum(x * d) for x, d in zip(shares, direction, strict=True))
    assert slope(p, dO, dS, direction._replace(alpha=p.alpha * direction.alpha)) == wanted


@pytest.mark.parametrize("T, K, V", [(1, 2, 2), (2, 2, 1), (3, 2, 1), (3, 1, 2)])
def test_gradients_are_sympy_s_derivative(T, K, V):
    p, up = symbolic(T, K, V), Upstream(entries("o", T, V), entries("s", K, V))
    forms = exact.recurrence_backward(*p, *up), exact.chunkwise_backward(*p, *up, chunk_size=2)
    for name, *found in zip(p._fields, *forms, strict=True):
        wanted = by_sympy(p, up, name) * (p.alpha if name == "alpha" else 1)
        for gradient in found:
            equal(gradient, wanted, name)


@property_test
@given(cases(min_tokens=1), st.integers(1, 9))
def test_backward_in_two_parts(case, chunk_size):
    """The later tokens first; their dS0 is the earlier ones' dS."""
    p, dO, dS = case
    at = len(p.k) // 2
    middle = exact.recurrence(*(x[:at] for x in p[:5]), p.S0).S
    late = exact.chunkwise_backward(*(x[at:] for x in p[:5]), middle, dO[at:], dS, chunk_size=chunk_size)
    early = exact.chunkwise_backward(*(x[:at] for x in p[:5]), p.S0, dO[:at], late.dS0, chunk_size=chunk_size)
    joined = [np.concatenate([x, y]) for x, y in zip(early[:5], late[:5], strict=True)]
    same([*joined, early.dS0], exact.recurrence_backward(*p, dO, dS))


@property_test
@given(cases(), st.integers(1, 9))
def test_backward_in_float64_agrees(case, chunk_size):
    p, dO, dS = case
    p = p._replace(k=p.k / (2 * p.k.shape[1]))
    floats = [x.astype(np.float64) for x in (*p, dO, dS)]
    wanted = exact.recurrence_backward(*p, dO, dS)
    for found in (exact.recurrence_backward(*floats), exact.chunkwise_backward(*floats, chunk_size=chunk_size)):
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == np.float64
            np.testing.assert_allclose(a, b.astype(np.float64), rtol=1e-11, atol=1e-11)


def float_case(T=50, K=6, V=5, decay=3, seed=0):
    """Random float64 with log decays down to -decay, and gradients of the outputs."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((T, width)) for width in (K, K, V))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    p = Problem(q, k, v, np.exp(-decay * rng.uniform(0.5, 1, T)), rng.uniform(0, 1, T), rng.standard_normal((K, V)))
    return p, rng.standard_normal((T, V)), rng.standard_normal((K, V))


@pytest.mark.parametrize("form", BACKWARD)
def test_zeros_are_zeros_in_float64(form):
    """Not small: the first token of an empty memory, a reset, and whatever comes after the outputs looked at."""
    p, dO, dS = float_case()
    p.alpha[20] = 0
    assert form(*p[:5], None, dO, dS).dg[0] == 0
    assert form(*p, dO, dS).dg[20] == 0
    dO[33:] = 0
    for gradient in form(*p, dO)[:5]:
        assert (gradient[33:] == 0).all() and (gradient[:33] != 0).any()


@pytest.mark.parametrize("decay", [0.01, 1, 10, 40])
def test_decay_gradient_keeps_its_digits(decay):
    """(9.13) at gates up to e^-40: every token's dg to eleven digits, against the same numbers as Fractions."""
    p, dO, _ = float_case(T=16, K=3, V=2, decay=decay)
    p = Problem(*(np.ldexp(np.round(np.ldexp(x, 20 + int(2 * decay))), -20 - int(2 * decay)) for x in p))
    whole = [np.frompyfunc(Fraction, 1, 1)(x) for x in (*p, dO)]
    wanted = exact.recurrence_backward(*whole).dg.astype(np.float64)
    for found in (exact.recurrence_backward(*p, dO), exact.chunkwise_backward(*p, dO, chunk_size=16)):
        np.testing.assert_allclose(found.dg, wanted, rtol=1e-11, atol=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, object])
@pytest.mark.parametrize("form", BACKWARD)
def test_backward_of_no_tokens(form, dtype):
    dS = np.arange(6).reshape(2, 3).astype(dtype)
    *rows, dS0 = form(*(np.zeros(s, dtype) for s in ((0, 2), (0, 2), (0, 3), (0,), (0,))), None, None, dS)
    assert [x.shape for x in rows] == [(0, 2), (0, 2), (0, 3), (0,), (0,)]
    assert (dS0 == dS).all() and dS0.dtype == dtype and dS0 is not dS


@pytest.mark.parametrize("form", BACKWARD)
def test_backward_changes_nothing_given(form):
    p, up = rational(6, 3, 2), rational(6, 3, 2, seed=1)
    before = [x.copy() for x in (*p, up.v, up.S0)]
    for gradient in form(*p, up.v, up.S0):
        gradient[...] = 7
    assert all((x == y).all() for x, y in zip((*p, up.v, up.S0), before, strict=True))


@pytest.mark.parametrize("form", BACKWARD)
def test_a_missing_gradient_is_a_zero_one(form):
    p, up = rational(6, 3, 2), rational(6, 3, 2, seed=1)
    same(form(*p, up.v), form(*p, up.v, up.S0 * 0))
    same(form(*p, None, up.S0), form(*p, up.v * 0, up.S0))
    same(form(*p), [x * 0 for x in form(*p, up.v)])


@pytest.mark.parametrize("form", BACKWARD)
def test_backward_names_a_wrong_shape(form):
    p = rational(5, 3, 2)
    with pytest.raises(ValueError, match=r"^dO: found shape \(4, 2\), expected \(5, 2\)"):
        form(*p, p.v[1:])
    with pytest.raises(ValueError, match=r"^dS: found shape \(2, 3\), expected \(3, 2\)"):
        form(*p, p.v, p.S0.T)
    with pytest.raises(ValueError, match="^q: found "):
        form(p.q[1:], *p[1:], p.v)


def test_backward_of_a_longer_rational_run():
    p, up = rational(24, 3, 2), rational(24, 3, 2, seed=1)
    for chunk_size in (5, 16, 64):
        same(exact.chunkwise_backward(*p, up.v, up.S0, chunk_size=chunk_size),
             exact.recurrence_backward(*p, up.v, up.S0))


def test_no_float_no_exp_no_division_in_the_source():
    """What lets every scalar type through."""
    forbidden = {"exp", "exp2", "log", "divide", "reciprocal", "inv"}
    for node in ast.walk(ast.parse(inspect.getsource(exact))):
        assert not (isinstance(node, ast.Constant) and isinstance(node.value, float)), node.lineno
        assert not isinstance(node, (ast.Div, ast.FloorDiv))
        assert not (isinstance(node, ast.Attribute) and node.attr in forbidden)
