"""Properties of how memory is used: what lies around the inputs, their strides, and doing it again."""

from __future__ import annotations

import torch
from torch import Tensor

from . import cases
from .cases import TOKENS, expected
from .probe import Probe
from .records import NotOffered
from .registry import holds


def amid_nan(x: Tensor) -> Tensor:
    """The same values as a view into memory that is NaN before and after every row of the first two axes."""
    B, T = x.shape[:2]
    around = torch.full((B + 2, T + 128, *x.shape[2:]), float("nan"), dtype=x.dtype, device=x.device)
    view = around[1 : B + 1, 64 : 64 + T]
    view.copy_(x)
    return view


@holds("NaN around the inputs", "what lies beside a tensor in memory is not read, or masked by selection", chapter=7)
def nan_around(probe: Probe) -> None:
    """All inputs are views into storages full of NaN; a last chunk that reads on would show."""
    for T in (130, 33):
        recipe = probe.fit(T=T, note="views into storages full of NaN")
        with probe.case(recipe):
            call = probe.make(recipe)
            state = None if call.initial_state is None else amid_nan(call.initial_state)
            views = {n: amid_nan(getattr(call, n)) for n in TOKENS}
            probe.compare(probe.forward(call._replace(**views, initial_state=state)), expected(call), call, recipe)


@holds("tokens of no sequence", "NaN beyond the last boundary touches no sequence", chapter=11, needs="packed")
def tokens_of_no_sequence(probe: Probe) -> None:
    """Two packed sequences, then 64 tokens of NaN that belong to none."""
    recipe = probe.fit(lengths=(70, 33), decays="slow", note="64 tokens of NaN beyond the last boundary")
    with probe.case(recipe):
        call = probe.make(recipe)
        longer = {n: _with_tail(getattr(call, n)) for n in TOKENS}
        o, state = probe.run(call._replace(**longer))
        found = {"o": o[:, :103]} | ({} if state is None else {"state": state})
        probe.compare(found, expected(call), call, recipe)


def _with_tail(x: Tensor) -> Tensor:
    return torch.cat([x, torch.full_like(x[:, :1], float("nan")).expand(-1, 64, *x.shape[2:])], 1)


@holds("strided inputs", "q, k and v are often views of one projection", chapter=11)
def strided_inputs(probe: Probe) -> None:
    """q, k, v, g, beta as views that split the last axis of one tensor each; none is contiguous."""
    recipe = probe.fit(B=2, T=70, note="views of one projection")
    with probe.case(recipe):
        call = probe.make(recipe)
        q, k, v = _views(call.q, call.k, call.v)
        g, beta = _views(call.g[..., None], call.beta[..., None])
        strided = call._replace(q=q, k=k, v=v, g=g[..., 0], beta=beta[..., 0])
        probe.compare(probe.forward(strided), expected(call), call, recipe)


def _views(*parts: Tensor) -> list[Tensor]:
    """The parts [B,T,heads,width] as views of one [B,T,sum of heads * width]."""
    whole = torch.cat([x.flatten(2) for x in parts], -1)
    pieces = whole.split([x.shape[2] * x.shape[3] for x in parts], dim=-1)
    return [piece.unflatten(-1, x.shape[2:]) for piece, x in zip(pieces, parts, strict=True)]


@holds("repeatability", "the same call gives the same bits", chapter=7)
def repeatability(probe: Probe) -> None:
    """Twice the same call, other calls between them."""
    recipe = probe.fit(B=2)
    with probe.case(recipe):
        call, other = probe.make(recipe), probe.make(probe.fit(T=70, decays="slow"))
        first = probe.forward(call)
        probe.forward(other)
        for name, again in probe.forward(call).items():
            probe.same(again, first[name], f"{name}, bit for bit", recipe, bound=0.0)


@holds("repeatable gradients", "the same call gives the same bits, backward too", chapter=9, needs="gradients")
def repeatable_gradients(probe: Probe) -> None:
    """Twice the same forward and backward."""
    recipe = probe.fit()
    with probe.case(recipe):
        call = probe.make(recipe)
        first, again = probe.with_gradients(call), probe.with_gradients(call)
        if not any(n.startswith("d") for n in first):
            raise NotOffered("no gradients")
        for name, x in again.items():
            probe.same(x, first[name], f"{name}, bit for bit", recipe, bound=0.0)


@holds("batch invariance", "a sequence does not know what else is in its batch", chapter=11, needs="batch")
def batch_invariance(probe: Probe) -> None:
    """Each row of a batch of three, alone."""
    recipe = probe.fit(B=3, T=100, note="each row alone")
    with probe.case(recipe):
        call = probe.make(recipe)
        whole = probe.forward(call)
        for b in range(recipe.B):
            row = {n: getattr(call, n)[b : b + 1] for n in cases.LEAVES if getattr(call, n) is not None}
            for name, alone in probe.forward(call._replace(**row)).items():
                probe.same(whole[name][b : b + 1], alone, f"{name} of row {b}", recipe)
