"""Properties of the gradients."""

from __future__ import annotations

import functools

import torch

from . import cases
from .probe import Probe
from .records import BOUNDS, NotOffered
from .registry import holds


@holds("gradients", "of every input, for gradients of o and of the final state", chapter=8, needs="gradients")
def gradients(probe: Probe) -> None:
    """Ordinary and slow decays, in every dtype of this run, and a length that fills no chunk."""
    for dtype in probe.dtypes:
        for decays in ("ordinary", "slow"):
            probe.agrees(gradients=True, dtype=dtype, decays=decays)
    probe.agrees(gradients=True, T=33, B=2, keys="correlated")


@holds("gradients, strong decay", "dg sums the pairs across its token: a difference of sums would drown it", chapter=9,
       needs="gradients")  # fmt: skip
def gradients_strong_decay(probe: Probe) -> None:
    """g of about -5 at every token."""
    for dtype in probe.dtypes:
        probe.agrees(gradients=True, dtype=dtype, decays="strong", T=70)


@holds("gradients, huge decay", "small decays keep the digits of their gradients beside one of -1000", chapter=9,
       needs="gradients")  # fmt: skip
def gradients_huge_decay(probe: Probe) -> None:
    """g of about -1000 at a fifth of the tokens, -0.01 at the others."""
    for dtype in probe.dtypes:
        probe.agrees(gradients=True, dtype=dtype, decays="huge_then_small", T=70)


@holds("gradients, sparse decay", "where next to nothing passes, a difference of sums leaves rounding in place of dg",
       chapter=9, needs="gradients")  # fmt: skip
def gradients_sparse_decay(probe: Probe) -> None:
    """g of about -20 at every eighth token, -0.01 at the others. dg of the strong ones is so small that no norm over
    all tokens sees it, so it is compared alone too."""
    for dtype in probe.dtypes:
        recipe = probe.fit(dtype=dtype, decays="sparse", T=70)
        with probe.case(recipe):
            call = probe.make(recipe)
            found = probe.with_gradients(call)
            right = functools.partial(_with_sparse_dg, with_state="state" in found)
            probe.compare(_sparse_dg_apart(found), right(call), call, recipe, right)


def _with_sparse_dg(call, with_state: bool) -> dict:
    return _sparse_dg_apart(cases.expected(call, wanted=True, with_state=with_state))


def _sparse_dg_apart(found: dict) -> dict:
    return {**found, "dg of strong decays": found["dg"][:, cases.SPARSE]}


@holds("gradients, exact reset", "0 * inf in a gradient is NaN: the exponent is masked before exp", chapter=7,
       needs="gradients")  # fmt: skip
def gradients_exact_reset(probe: Probe) -> None:
    """alpha = 0 at a fifth of the tokens."""
    probe.agrees(gradients=True, decays="reset", T=70)


@holds("gradients, no decay", "g = 0 has a gradient like any other decay", chapter=7, needs="gradients")
def gradients_no_decay(probe: Probe) -> None:
    """g = 0 everywhere, from a random state."""
    probe.agrees(gradients=True, decays="none", T=70)


@holds("gradient of the state", "what the final state is asked to change reaches every input", chapter=8,
       needs="gradients final_state")  # fmt: skip
def gradient_of_the_state(probe: Probe) -> None:
    """The loss reads the final state alone."""
    recipe = probe.fit(T=70, decays="slow", note="the loss reads the final state alone")
    with probe.case(recipe):
        call = probe.make(recipe)
        right = functools.partial(_of_the_state, cases.definition)
        probe.compare(_of_the_state(probe.run, call), right(cases.widened(call)), call, recipe, right)


def _of_the_state(run, call) -> dict:
    call, leaves = cases.with_leaves(call)
    o, state = run(call)
    if not state.requires_grad:
        raise NotOffered("the final state carries no gradient")
    empty = torch.zeros(o.shape, dtype=torch.float64)
    like = cases.upstream(empty, torch.empty(state.shape))
    return cases.gradients(o.detach(), state, leaves, (empty, like[1]))


@holds("gradients, width 128", "a compiler once got one tile width wrong on one GPU, in the backward pass alone",
       chapter=9, needs="gradients")  # fmt: skip
def gradients_width_128(probe: Probe) -> None:
    """K = V = 128, ordinary and slow decays."""
    for dtype in probe.dtypes:
        for decays in ("ordinary", "slow"):
            wide = [dict(K=128, V=128, decays=decays, dtype=dtype)]
            for recipe in probe.fitting(wide, lambda r: r.K == r.V == 128, "asked with other widths only"):
                probe.agrees(gradients=True, **recipe)


@holds("gradients, grouped heads", "a key head's gradient is the sum over its value heads", chapter=11,
       needs="gradients gva")  # fmt: skip
def gradients_grouped(probe: Probe) -> None:
    """Ratios 3 and 4."""
    recipes = [dict(H=2, HV=2 * ratio, T=70) for ratio in (3, 4)]
    for recipe in probe.fitting(recipes, lambda r: r.HV > r.H, "asked with HV = H only"):
        probe.agrees(gradients=True, **recipe)


@holds("gradients, packing", "no gradient crosses a boundary", chapter=11, needs="gradients packed")
def gradients_packing(probe: Probe) -> None:
    """Lengths 70, 1, 63, each from its own state."""
    probe.agrees(gradients=True, lengths=(70, 1, 63), decays="slow")


@holds("causality of gradients", "what is asked of early outputs changes nothing about later tokens", chapter=8,
       needs="gradients")  # fmt: skip
def causality_of_gradients(probe: Probe) -> None:
    """The loss reads o before a token; gradients from that token on are zero, those before are right."""
    for t in (1, 64, 65):
        recipe = probe.fit(note=f"the loss reads o before token {t}")
        with probe.case(recipe):
            call, leaves = cases.with_leaves(probe.make(recipe))
            o, _ = probe.run(call)
            if not o.requires_grad:
                raise NotOffered("the output carries no gradient")
            upstream = cases.upstream(o, torch.empty(1))[0].to(o.device)
            upstream[:, t:] = 0
            found = cases.gradients(o, None, leaves, (upstream,))
            bound = BOUNDS[recipe.dtype].gradient
            for name in ("dq", "dk", "dv", "dg", "dbeta"):
                late, size = found[name][:, t:].double().norm(), found[name].double().norm()
                error = float(late / size.clamp_min(cases.FLOOR))
                probe.record(error if error == error else float("inf"), f"{name} from token {t} on", recipe, bound)
