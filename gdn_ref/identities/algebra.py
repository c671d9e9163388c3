"""What a proof is made of: symbols, rationals, and three ways to decide.

A proof is a function without arguments.  It calls ``equal`` (both sides the same), ``differ`` (they are not) or
``holds`` (a fact that follows from the domain).  Each of them raises ProofError with what is left over; a proof that
returns has therefore been carried out.

Rungs, weakest first:  entries(...) gives matrices of small fixed size with SymPy entries;  rational(...) gives bigger
ones of Fractions;  words(...) gives noncommutative symbols, one a matrix, so that the size does not matter.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import sympy as sp


class ProofError(AssertionError):
    """A proof did not go through; ``residual`` is the text of what was left over."""

    def __init__(self, message, residual=""):
        super().__init__(message)
        self.residual = residual or message


@dataclass(frozen=True)
class Identity:
    """One tagged line of the book.  ``proof`` raises ProofError or returns; if refuted, it returns the residual."""

    tag: str
    statement: str
    proof: Callable[[], object]
    refuted: bool = False

    @property
    def chapter(self):
        """The chapter's number, from the tag."""
        return int(self.tag.partition(".")[0])


# ---- symbols and numbers ---------------------------------------------------------------------------------------------


def words(names):
    """Noncommutative symbols: matrices, rows and columns of any size.  The unit matrix is written 1."""
    return sp.symbols(names, commutative=False, seq=True)


def scalars(names, **domain):
    """Real scalars, with further assumptions such as positive=True."""
    return sp.symbols(names, real=True, seq=True, **domain)


def entries(name, *shape, **domain):
    """An array [*shape] of dtype object whose entries are real symbols name_ij."""
    array = np.empty(shape, dtype=object)
    for index in np.ndindex(*shape):
        array[index] = sp.Symbol(f"{name}_{''.join(map(str, index))}", real=True, **domain)
    return array


def strictly_lower(name, C):
    """The general strictly lower triangular [C, C], every entry below the diagonal its own symbol."""
    return np.tril(entries(name, C, C), -1)


def identity(n):
    """The unit matrix [n, n], with entries that any scalar type can meet."""
    return np.eye(n, dtype=object)


def block_product(A, B):
    """The product of two 2×2 block matrices (lists of lists) whose blocks are words."""
    return [[sum(A[i][m] * B[m][j] for m in range(2)) for j in range(2)] for i in range(2)]


class Problem(NamedTuple):
    """Arguments of ``exact.recurrence``, in its order:  q, k [T, K];  v [T, V];  alpha, beta [T];  S0 [K, V]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    alpha: np.ndarray
    beta: np.ndarray
    S0: np.ndarray

    def ungated(self):
        """The same with alpha = 1."""
        return self._replace(alpha=self.alpha * 0 + 1)


def symbolic(T, K, V):
    """A problem with a symbol for every entry; alpha > 0, so that quotients of decays exist."""
    return Problem(entries("q", T, K), entries("k", T, K), entries("v", T, V),
                   entries("α", T, positive=True), entries("β", T), entries("S", K, V))


def rational(T, K, V, seed=0, resets=True):
    """A problem of Fractions, the same for the same seed: alpha in [0, 1], beta in [0, 2], key 2 repeated.

    resets: alpha = 0 at every fifth token; without them every alpha > 0.
    """
    draw = random.Random(f"{T} {K} {V} {seed}")

    def numbers(low, high, *shape):
        array = np.empty(shape, dtype=object)
        for index in np.ndindex(*shape):
            array[index] = Fraction(draw.randint(low * 4, high * 4), 4) / draw.choice([1, 1, 2, 3])
        return array

    k, alpha = numbers(-2, 2, T, K), 1 - numbers(0, 1, T) * Fraction(3, 4)
    k[2::3] = k[1:-1:3]
    if resets:
        alpha[4::5] = Fraction(0)
    return Problem(numbers(-2, 2, T, K), k, numbers(-2, 2, T, V), alpha, numbers(0, 2, T), numbers(-2, 2, K, V))


# ---- derivatives -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dual:
    """A number with its slope along one direction.  Sums and products of Duals carry exact derivatives with them.

    ``exact.py`` only adds and multiplies, so a run of it on Duals of Fractions is its own derivative, for any size.
    """

    value: object
    slope: object = 0

    def __add__(self, other):
        if isinstance(other, np.ndarray):
            return NotImplemented                     # the array goes through its entries
        other = other if isinstance(other, Dual) else Dual(other)
        return Dual(self.value + other.value, self.slope + other.slope)

    def __mul__(self, other):
        if isinstance(other, np.ndarray):
            return NotImplemented
        other = other if isinstance(other, Dual) else Dual(other)
        return Dual(self.value * other.value, self.slope * other.value + self.value * other.slope)

    def __neg__(self):
        return Dual(-self.value, -self.slope)

    def __sub__(self, other):
        return NotImplemented if isinstance(other, np.ndarray) else self + -other

    def __rsub__(self, other):
        return -self + other

    __radd__, __rmul__ = __add__, __mul__


def _words_of(expression):
    """(number, list of words) of each term; a power of a word is the word several times."""
    for term in sp.Add.make_args(sp.expand(expression)):
        numbers, factors = term.args_cnc()
        powers = [x.as_base_exp() for x in factors]
        yield sp.Mul(*numbers), [base for base, times in powers for _ in range(times)]


def transposed(expression, partner):
    """The transpose of an expression in words: in every term the partners of its words, in reverse order."""
    return sum((n * sp.Mul(*(partner[x] for x in reversed(w))) for n, w in _words_of(expression)), sp.S.Zero)


def trace(expression, partner):
    """The trace of an expression in words.  Neither a rotation nor the transpose of a word changes it, so of all these
    the first in the alphabet stands for each term."""
    found = sp.S.Zero
    for number, w in _words_of(expression):
        both = w, [partner[x] for x in reversed(w)]
        found += number * sp.Mul(*min((x[i:] + x[:i] for x in both for i in range(len(x))), key=str))
    return found


def gradient(loss, X, partner):
    """The gradient with respect to the word X, in X's shape, of the trace of ``loss``.  partner: {word: its transpose}.

    To first order the loss changes by tr(M δXᵀ) or tr(M δX); rotated so that δX is last, M or its transpose is the
    gradient.
    """
    h, = scalars("h")
    d, dT = words("δ δᵀ")
    moved = sp.expand(loss.subs({X: X + h * d, partner[X]: partner[X] + h * dT}, simultaneous=True))
    found = sp.S.Zero
    for number, w in _words_of(moved.coeff(h, 1)):
        at = next(i for i, x in enumerate(w) if x in (d, dT))
        rest = sp.Mul(*(w[at + 1:] + w[:at]))
        found += number * (rest if w[at] == dT else transposed(rest, partner))
    return sp.expand(found)


# ---- deciding --------------------------------------------------------------------------------------------------------


def is_zero(x):
    """Decide x = 0 exactly, for a number or an expression, by expansion; never by sampling, never by simplify."""
    if isinstance(x, (int, Fraction, np.integer)):
        return x == 0
    if sp.expand(x) == 0:
        return True
    return bool(x.is_commutative) and sp.expand(sp.numer(sp.together(x))) == 0


def forbid_floats(array):
    """TypeError if a float stands anywhere in an array [*] of numbers and expressions: a proof would be a guess."""
    for x in array.ravel():
        if isinstance(x, (float, np.floating)) or isinstance(x, sp.Basic) and x.has(sp.Float):
            raise TypeError(f"a float has slipped into a proof: {x!r}")


def residuals(lhs, rhs):
    """The entries of lhs − rhs that are not zero, as {index: value}."""
    lhs, rhs = np.asarray(lhs, dtype=object), np.asarray(rhs, dtype=object)
    if lhs.shape != rhs.shape:
        raise ProofError(f"the sides have different shapes, {lhs.shape} and {rhs.shape}")
    if lhs.size == 0:
        raise ProofError("nothing was compared: both sides are empty")
    forbid_floats(lhs)
    forbid_floats(rhs)
    return {index: lhs[index] - rhs[index] for index in np.ndindex(*lhs.shape) if not is_zero(lhs[index] - rhs[index])}


def show(residual):
    """One line of text for the first entry of ``residuals``' answer."""
    index, value = next(iter(residual.items()))
    value = sp.factor(value) if getattr(value, "is_commutative", False) else sp.expand(value)
    text = str(value)
    text = text if len(text) <= 200 else text[:197] + "..."
    return text if index == () else f"entry {list(index)}: {text}"


def equal(lhs, rhs, where=""):
    """Both sides are the same in every entry, or ProofError with the first residual."""
    left_over = residuals(lhs, rhs)
    if left_over:
        text = show(left_over)
        raise ProofError(f"{where + ': ' if where else ''}the residual is not zero: {text}", text)


def differ(lhs, rhs, where=""):
    """The sides are not the same; returns the first residual's text.  ProofError when they agree after all."""
    left_over = residuals(lhs, rhs)
    if not left_over:
        raise ProofError(f"{where + ': ' if where else ''}the residual is zero, so the formula is not refuted", "0")
    return show(left_over)


def holds(fact, what):
    """A fact decided by the domain assumptions or by exact comparison; None, that is undecided, fails as False does."""
    if fact is None or not bool(fact):
        raise ProofError(f"not established: {what} ({fact})")
