"""Properties of the state: its layout, carrying it on, packing, padding."""

from __future__ import annotations

import itertools

import torch

from .cases import TOKENS, expected
from .probe import Probe
from .records import Call
from .registry import holds

CARRIED = "initial_state final_state"


@holds("layout of the state", "[N, HV, K, V]: where K = V a transposed one fits too, and is wrong", chapter=11,
       needs=CARRIED)  # fmt: skip
def layout(probe: Probe) -> None:
    """K = V and a random start, which no transposition survives; and K other than V where that is offered."""
    probe.agrees(K=32, V=32, T=33, decays="slow")
    probe.agrees(T=33, decays="slow")


@holds("state as [V, K]", "on request the state comes and goes transposed, and nothing else changes", chapter=11,
       needs=f"{CARRIED} state_v_first")  # fmt: skip
def layout_v_first(probe: Probe) -> None:
    """K = V, where a forgotten transposition would fit."""
    for K, V in ((32, 32), (16, 24)):
        recipe = probe.fit(K=K, V=V, T=33, decays="slow", note="state_v_first")
        with probe.case(recipe):
            call = probe.make(recipe)
            call = call._replace(initial_state=call.initial_state.mT.contiguous(), state_v_first=True)
            probe.compare(probe.forward(call), expected(call), call, recipe)


def piece(call: Call, a: int, b: int, state) -> Call:
    """Tokens a to b of a batch, from a given state."""
    return call._replace(**{n: getattr(call, n)[:, a:b] for n in TOKENS}, initial_state=state)


def in_pieces(probe: Probe, call: Call, cuts: list[int], steps_from: int) -> dict:
    """o and state of a call made in pieces that end at the cuts; pieces from number steps_from on are decoded."""
    outputs, state = [], call.initial_state
    for n, (a, b) in enumerate(itertools.pairwise([0, *cuts])):
        o, state = probe.run(piece(call, a, b, state), step=n >= steps_from)
        outputs.append(o)
    return {"o": torch.cat(outputs, 1), "state": state}


@holds("split prefill", "a long prompt in pieces, the state carried on, is the prompt", chapter=11, needs=CARRIED)
def split_prefill(probe: Probe) -> None:
    """200 tokens whole and in pieces, one of them a single token."""
    for pieces in ((64, 136), (1, 199), (63, 1, 136)):
        recipe = probe.fit(T=200, decays="slow", note=f"in pieces of {'+'.join(map(str, pieces))}")
        with probe.case(recipe):
            call = probe.make(recipe)
            found = in_pieces(probe, call, list(itertools.accumulate(pieces)), len(pieces))
            probe.compare(found, expected(call), call, recipe)


@holds("prefill then decode", "tokens decoded one by one go on where the prompt ended", chapter=11, needs=CARRIED)
def prefill_then_decode(probe: Probe) -> None:
    """A prompt of 70 tokens, then five more one at a time; and a prompt of one whole chunk."""
    for prompt in (70, 64):
        recipe = probe.fit(T=prompt + 5, B=2, K=32, V=32, decays="slow", note=f"the last 5 decoded after {prompt}")
        with probe.case(recipe):
            call = probe.make(recipe)
            found = in_pieces(probe, call, list(range(prompt, prompt + 6)), 1)
            probe.compare(found, expected(call), call, recipe)


@holds("packing", "packed sequences are separate runs: nothing leaks over a boundary", chapter=11, needs="packed")
def packing(probe: Probe) -> None:
    """Lengths 70, 1, 63 and 130, slow decays, each from its own state."""
    for dtype in probe.dtypes:
        probe.agrees(lengths=(70, 1, 63, 130), decays="slow", dtype=dtype)
    if probe.full:
        probe.agrees(lengths=tuple(range(1, 40)), decays="slow")


@holds("empty sequences", "a sequence without tokens leaves its state as it was", chapter=11, needs="packed", full=True)
def empty_sequences(probe: Probe) -> None:
    """Empty sequences first, between and last."""
    probe.agrees(lengths=(0, 5, 0, 70, 0), decays="slow")


@holds("many sequences", "more than 65535 / HV of them do not fit the second axis of a launch grid", chapter=11,
       needs="packed", full=True)  # fmt: skip
def many_sequences(probe: Probe) -> None:
    """2100 sequences of one token with 32 heads. As a whole: a query may all but miss its only key."""
    recipe = probe.fit(lengths=(1,) * 2100, H=16, HV=32, K=16, V=16, state=False)
    with probe.case(recipe):
        call = probe.make(recipe)
        right = expected(call)
        for name, x in probe.forward(call).items():
            probe.same(x, right[name], f"{name} of all sequences", recipe)


@holds("padding", "beta = 0 and g = 0 make a token that changes nothing, whatever its key and value", chapter=11)
def padding(probe: Probe) -> None:
    """Ten such tokens on the left and twenty on the right."""
    recipe = probe.fit(T=100, decays="slow", note="10 tokens before and 20 after with beta = 0, g = 0")
    with probe.case(recipe):
        call = probe.make(recipe)
        inside = torch.zeros(1, recipe.T, 1, dtype=torch.bool, device=call.v.device)
        inside[:, 10:80] = True
        padded = call._replace(g=torch.where(inside, call.g, 0), beta=torch.where(inside, call.beta, 0))
        found, right = probe.forward(padded), expected(piece(call, 10, 80, call.initial_state))
        found["o"] = found["o"][:, 10:80]
        probe.compare(found, right, piece(call, 10, 80, call.initial_state), recipe)


@holds("inputs stay", "a caller's tensors are read, never written", chapter=11)
def inputs_stay(probe: Probe) -> None:
    """Every input is bitwise what it was, the initial state above all."""
    recipe = probe.fit(T=70)
    with probe.case(recipe):
        call = probe.make(recipe)
        before = [None if x is None else x.clone() for x in call[:6]]
        probe.run(call)
        for name, x, old in zip(Call._fields, call[:6], before, strict=False):
            if x is not None:
                probe.claim(torch.equal(x, old), f"{name} is as it was", recipe)
