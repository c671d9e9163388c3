"""Running the properties over an implementation, and the check of the check itself."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import torch

from .. import exact
from . import backward, forward, pools, states, surroundings
from .adapters import LoadError, lacking, load
from .cases import Source, definition
from .probe import Probe
from .records import ERROR, FAIL, NOT_OFFERED, PASS, Call, Finding, Implementation, Property, Report
from .registry import REGISTERED

MOST_KEPT = 4  # failed cases of a property that a report lists
PROPERTIES = [p for module in (forward, states, backward, surroundings, pools) for p in REGISTERED[module.__name__]]


def examine(item: Property, implementation: Implementation, device: str = "cpu", full: bool = False) -> Finding:
    """One property of one implementation."""
    start = time.perf_counter()
    if missing := lacking(item.needs, implementation.offers):
        return Finding(item, NOT_OFFERED, None, 0, 0, (), missing, 0.0)
    probe = Probe(implementation, device, full)
    item.test(probe)
    worst = max(probe.measurements, key=lambda m: m.ratio, default=None)
    failed = [m for m in probe.measurements if not m.ok]
    raised = [m.message for m in failed if m.message]
    verdict, note = PASS, ""
    if probe.refusals:
        verdict, note = NOT_OFFERED, "; ".join(dict.fromkeys(probe.refusals))
    elif not probe.measurements:
        verdict, note = ERROR, "nothing was measured"
    if failed:
        verdict = ERROR if len(raised) == len(failed) else FAIL
        note = "; ".join(dict.fromkeys(raised))
    seconds = time.perf_counter() - start
    return Finding(item, verdict, worst, len(probe.measurements), len(failed), tuple(failed[:MOST_KEPT]), note, seconds)


def choose(names: Iterable[str] = (), full: bool = False) -> list[Property]:
    """The properties of a level, or those named.  ValueError, listing them, if a name is unknown."""
    known = {p.name: p for p in PROPERTIES}
    if unknown := [n for n in names if n not in known]:
        raise ValueError(f"found {', '.join(map(repr, unknown))}, expected one of {', '.join(map(repr, known))}")
    return [p for p in PROPERTIES if p.name in names] if names else [p for p in PROPERTIES if full or not p.full]


def check(implementation: Implementation, properties: list[Property], device: str = "cpu", full: bool = False,
          done=lambda item, finding: None) -> Report:  # fmt: skip
    """All properties of one implementation. done: called after each, for a progress bar."""
    findings = []
    for item in properties:
        findings.append(examine(item, implementation, device, full))
        done(item, findings[-1])
    level = "full" if full else "quick"
    return Report(implementation.name, implementation.version, device_name(device), level, tuple(findings))


def check_named(spec: str, properties: list[Property], device: str = "cpu", full: bool = False,
                adapter: str | None = None, without: Iterable[str] = (), limits: dict | None = None,
                done=lambda item, finding: None) -> Report:  # fmt: skip
    """check, of what adapters.load finds under a name; where it cannot be had the report says why."""
    try:
        implementation = load(spec, device, adapter, without, limits)
    except LoadError as error:
        return Report(spec, "", device_name(device), "full" if full else "quick", (), str(error))
    return check(implementation, properties, device, full, done)


def is_fatal(finding: Finding) -> bool:
    """Whether a call has left the GPU unusable for this process, so that all that follows would raise too."""
    return finding.verdict == ERROR and any(word in finding.note for word in ("CUDA error", "illegal memory access"))


def device_name(device: str) -> str:
    """What a report says it ran on."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


# ---- the check of the check ------------------------------------------------------------------------------------------


def self_test() -> str:
    """Hold the float64 recurrence and its gradients against exact fractions; "" or what is wrong.

    The outputs are polynomials of the inputs, so that over fractions a difference over a tiny step is a derivative to
    any digit wanted.
    """
    try:
        names, T, K, V = ("q", "k", "v", "alpha", "beta", "S0"), 4, 3, 2
        source = Source("self-test")
        shapes = {"q": (T, K), "k": (T, K), "v": (T, V), "alpha": (T,), "beta": (T,), "S0": (K, V)}
        x = {n: (source.uniform(*shapes[n]) * 64).round() / 64 + 1 / 64 for n in names}
        tensors = {n: t.clone().requires_grad_() for n, t in x.items()}
        batch = [tensors[n][None, :, None] for n in ("q", "k", "v")]
        gates = [tensors["alpha"].log()[None, :, None], tensors["beta"][None, :, None]]
        o, S = definition(Call(*batch, *gates, tensors["S0"][None, None], scale=1.0))
        fractions = {n: np.vectorize(Fraction, otypes=[object])(t.numpy()) for n, t in x.items()}
        right = exact.recurrence(*fractions.values())
        _near("o", o[0, :, 0], right.O)
        _near("the state", S[0, 0], right.S)
        found = torch.autograd.grad(o.sum() + S.sum(), list(tensors.values()))
        for n, d in zip(names, found, strict=True):
            _near(f"the gradient of {n}", d, _derivative(fractions, n))
    except AssertionError as error:
        return str(error)
    except Exception:  # whatever breaks here, the check cannot be trusted
        return traceback.format_exc(limit=-2)
    return ""


def _derivative(x: dict, name: str) -> np.ndarray:
    """d (sum of O and S) / d x[name], by differences over exact fractions."""
    def total(y):
        out = exact.recurrence(*y.values())
        return out.O.sum() + out.S.sum()

    step, slope = Fraction(1, 10**12), np.zeros(x[name].shape, dtype=object)
    for index in np.ndindex(slope.shape):
        sides = []
        for sign in (1, -1):
            moved = x[name].copy()
            moved[index] += sign * step
            sides.append(total({**x, name: moved}))
        slope[index] = (sides[0] - sides[1]) / (2 * step)
    return slope


def _near(name: str, found: torch.Tensor, right: np.ndarray) -> None:
    right = torch.from_numpy(right.astype(float))
    error = float((found.detach() - right).norm() / right.norm())
    assert math.isfinite(error) and error < 1e-13, f"the reference's {name} is {error:.1e} off over fractions"
