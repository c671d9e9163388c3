"""Chapter 13, a model that learns.  What the layer around the rule does to its decay and to its output."""

import sympy as sp

from .. import exact
from .algebra import Identity, differ, entries, equal, holds, scalars, symbolic

d, c = scalars("d c", positive=True)  # a step size dt; a factor
g, = scalars("g", negative=True)


def softplus(x):
    """ln(1 + e^x)."""
    return sp.log(1 + sp.exp(x))


def fresh_heads_step():
    """Both sides as powers of e, since softplus and ln are increasing."""
    equal(sp.exp(softplus(d + sp.log(1 - sp.exp(-d)))), sp.exp(d))
    holds((1 - sp.exp(-d)).subs(d, sp.Rational(1, 1000)) > 0, "the logarithm's argument is positive for small steps")


def half_life():
    """α = e^g over n tokens, n any positive real number."""
    equal(sp.exp(g * (sp.log(2) / -g)), sp.Rational(1, 2))


def mean_square(o):
    """Of the entries [V]."""
    return sum(x * x for x in o) / len(o)


def norm_takes_out_a_factor():
    """Entry by entry for several widths: squares equal, signs equal since c > 0."""
    holds(c.is_positive, "c > 0")
    for V in (1, 2, 5):
        o = entries("o", V)
        for x in o:
            equal((c * x) ** 2 * mean_square(o), x**2 * mean_square(c * o), f"V = {V}")


def norm_hides_the_decay():
    """Two tokens, two value entries: the second decay turns the output unless nothing is written after it."""
    p = symbolic(2, 1, 2)
    other = p._replace(alpha=entries("a", 2, positive=True))
    other.alpha[0] = p.alpha[0]
    unwritten = [x._replace(beta=x.beta * [1, 0]) for x in (p, other)]
    (one, two), (here, there) = ([exact.recurrence(*x).O[1] for x in pair] for pair in (unwritten, (p, other)))
    equal(one[0] * two[1], one[1] * two[0], "nothing written: the same direction")
    return differ(here[0] * there[1], here[1] * there[0], "something written")


IDENTITIES = [
    Identity("13.1", "softplus(d + ln(1 − e^(−d))) = d: with a = 0 a fresh head forgets at rate A·d", fresh_heads_step),
    Identity("13.2", "α^n = 1/2 after n = ln 2/(−g) tokens: the half-life", half_life),
    Identity("13.3", "norm(c·o) = norm(o) for c > 0 and ε = 0: no factor of the readout gets past the norm",
             norm_takes_out_a_factor),
    Identity("13.4", "norm(o) does not depend on the decay", norm_hides_the_decay, refuted=True),
]
