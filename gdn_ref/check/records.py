"""What the check is made of: an implementation and what it offers, one call, a measurement, a verdict, the bounds.

Every implementation is met through one call with one layout, whatever its own names and layouts are; adapters.py
translates. What an implementation lacks is written down in its Offers, and a property that needs it is then reported
as "not offered", which is never a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

FEATURES = {
    "initial_state": "initial state to start from",
    "final_state": "final state given back",
    "packed": "packed sequences (cu_seqlens)",
    "batch": "batches (B > 1)",
    "gva": "more value heads than key heads",
    "widths": "K other than V",
    "gradients": "gradients of the inputs",
    "default_scale": "scale of its own, K^-1/2 by default",
    "scale": "other scales",
    "l2norm": "L2 norm of q and k on request",
    "normalises": "L2 norm of q and k at all times",
    "large_beta": "write strengths beyond 1",
    "raw_gates": "raw gates with A_log and dt_bias",
    "state_v_first": "state as [V, K] on request",
    "chunk_size": "chunk size as an argument",
    "pool": "pool of states (slots, updated in place)",
    "fresh": "fresh requests in used slots (has_initial_state)",
    "bfloat16_pool": "pool in bfloat16",
}


class Bound(NamedTuple):
    """The largest relative L2 error, per sequence and head, against the float64 recurrence."""

    o: float
    state: float
    gradient: float


# The one table. A float32 or float64 implementation carries about 7 or 16 digits and may lose one or two on the way;
# 16-bit products keep 8 bits (bfloat16) or 11, and gradients pass through twice as many of them.
BOUNDS = {
    "float64": Bound(1e-12, 1e-12, 1e-10),
    "float32": Bound(1e-5, 1e-5, 1e-5),
    "float16": Bound(1e-2, 1e-2, 2e-2),
    "bfloat16": Bound(1e-2, 1e-2, 2e-2),
}


class Offers(NamedTuple):
    """What an implementation can be asked for."""

    features: frozenset[str]  # names of FEATURES
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")  # of q, k, v; the first is what most cases run in
    widths: tuple[tuple[int, int], ...] | None = None  # the only (K, V) it takes
    heads: tuple[tuple[int, int], ...] | None = None  # the only (H, HV) to ask for: some compile for minutes
    chunk_sizes: tuple[int, ...] = (16, 32, 64)


class Call(NamedTuple):
    """One call, in the layout of this package; an adapter turns it into the implementation's own."""

    q: Tensor  # [B,T,H,K]
    k: Tensor  # [B,T,H,K]
    v: Tensor  # [B,T,HV,V]
    g: Tensor  # [B,T,HV] natural-log decay, or the raw gate a where A_log is given
    beta: Tensor  # [B,T,HV] write strength, or the raw gate b where A_log is given
    initial_state: Tensor | None = None  # [N,HV,K,V], or [N,HV,V,K] with state_v_first
    cu_seqlens: Tensor | None = None  # [N+1]
    scale: float | None = None
    l2norm: bool = False
    state_v_first: bool = False
    chunk_size: int | None = None
    A_log: Tensor | None = None  # [HV]
    dt_bias: Tensor | None = None  # [HV]


class Result(NamedTuple):
    """What a call gives back."""

    o: Tensor  # [B,T,HV,V]
    state: Tensor | None  # like initial_state


class Implementation(NamedTuple):
    """Something to check."""

    name: str
    run: Callable[[Call], Result]
    offers: Offers
    version: str = ""
    extend: Callable | None = None  # over a pool, with gdn_extend_chunkwise's arguments
    step: Callable[[Call], Result] | None = None  # what decodes after run; run itself where there is nothing else
    refusal: str = ""  # words of an exception that is its own refusal and no accident


class NotOffered(Exception):
    """The implementation does not do what is asked; the message says what."""


class Property(NamedTuple):
    """Something every implementation must do."""

    name: str
    reason: str  # one line: why it matters
    chapter: str  # where the book shows it
    needs: frozenset[str]  # names of FEATURES
    test: Callable  # runs the cases; see probe.Probe
    full: bool = False  # left out of --quick


class Measurement(NamedTuple):
    """One number that was measured, or one call that raised."""

    error: float
    bound: float
    what: str  # "o, sequence 0, head 3"
    case: dict  # the recipe of the inputs: cases.make(Recipe(**case)) makes them again
    message: str = ""  # what an exception said

    @property
    def ok(self) -> bool:
        """Within the bound; NaN is not."""
        return not self.message and self.error <= self.bound

    @property
    def ratio(self) -> float:
        """How much of the bound is used up; what the worst case is chosen by."""
        if self.message or self.error != self.error:
            return float("inf")
        return self.error / self.bound if self.bound else (0.0 if self.error == 0 else float("inf"))


PASS, FAIL, ERROR, NOT_OFFERED = "pass", "FAIL", "ERROR", "not offered"


class Finding(NamedTuple):
    """What came of one property of one implementation."""

    property: Property
    verdict: str  # one of the four above
    worst: Measurement | None
    cases: int  # how many measurements
    failures: int  # how many of them out of bounds, or raised
    failed: tuple[Measurement, ...]  # the first of these
    note: str  # why it is not offered, or what an exception said
    seconds: float


class Report(NamedTuple):
    """All findings of one implementation."""

    name: str
    version: str
    device: str
    level: str  # "quick" or "full"
    findings: tuple[Finding, ...]
    problem: str = ""  # why it could not be loaded

    @property
    def ok(self) -> bool:
        """Nothing failed, and the definition itself was among what passed."""
        bad = any(f.verdict in (FAIL, ERROR) for f in self.findings)
        return not self.problem and not bad and any(f.verdict == PASS for f in self.findings)

    def count(self, verdict: str) -> int:
        """How many properties came to this verdict."""
        return sum(f.verdict == verdict for f in self.findings)
