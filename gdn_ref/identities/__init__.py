"""Every identity of the book, read as one list: tag, statement, proof.

    from gdn_ref.identities import IDENTITIES, prove
    prove("5.4")                 # Result(tag='5.4', ...), or ProofError with the residual

A statement that the book refutes (a formula printed somewhere that is wrong) stands in the same list with
``refuted=True``; its proof shows that the two sides differ, and ``Result.residual`` says by what.  Notebooks, tests and
``python -m gdn_ref prove`` all run this list.  It needs SymPy:  pip install "gdn_ref[notebooks]".
"""

import time
from typing import NamedTuple

try:
    import sympy  # noqa: F401
except ImportError as error:
    raise ImportError('the proofs need SymPy, which is not installed: pip install "gdn_ref[notebooks]"') from error

from . import ch01, ch02, ch03, ch04, ch05, ch06, ch07, ch08, ch09, ch10, ch11, ch12, ch13
from .algebra import Identity, ProofError

__all__ = ["IDENTITIES", "Identity", "ProofError", "Result", "check", "get", "prove"]

CHAPTERS = (ch01, ch02, ch03, ch04, ch05, ch06, ch07, ch08, ch09, ch10, ch11, ch12, ch13)
IDENTITIES = [identity for chapter in CHAPTERS for identity in chapter.IDENTITIES]


class Result(NamedTuple):
    """What came of one proof.  ok: proved, or refuted where the book says refuted.  residual: text, "" if none."""

    tag: str
    statement: str
    refuted: bool
    ok: bool
    residual: str
    seconds: float

    @property
    def verdict(self):
        """One stable phrase, fit for a notebook's output."""
        if not self.ok:
            return "FAILED"
        return "refuted, as it should be" if self.refuted else "proved"


def get(tag):
    """The Identity under a tag such as "5.4" or "(5.4)".  KeyError, naming the chapter's tags, if there is none."""
    wanted = str(tag).strip("() ")
    for identity in IDENTITIES:
        if identity.tag == wanted:
            return identity
    chapter = [i.tag for i in IDENTITIES if i.tag.partition(".")[0] == wanted.partition(".")[0]]
    known = chapter or [i.tag for i in IDENTITIES]
    raise KeyError(f"tag: found {tag!r}, expected one of {', '.join(known)}")


def check(tag):
    """Run one proof and report; a failure comes back as a Result with ok=False, whatever went wrong inside."""
    identity = get(tag)
    start = time.perf_counter()
    try:
        answer, ok = identity.proof(), True
        if identity.refuted and not isinstance(answer, str):
            answer, ok = "a refutation must return its residual", False
    except ProofError as error:
        answer, ok = error.residual, False
    except Exception as error:  # a proof that cannot be carried out proves nothing
        answer, ok = f"{type(error).__name__}: {error}", False
    residual = answer if isinstance(answer, str) else ""
    return Result(identity.tag, identity.statement, identity.refuted, ok, residual, time.perf_counter() - start)


def prove(tag):
    """Run one proof.  Returns its Result; raises ProofError, with the residual, if it does not go through."""
    result = check(tag)
    if not result.ok:
        kind = "not refuted" if result.refuted else "not proved"
        raise ProofError(f"({result.tag}) {result.statement}  {kind}: {result.residual}", result.residual)
    return result
