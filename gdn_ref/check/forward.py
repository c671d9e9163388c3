"""Properties of the output and the final state."""

from __future__ import annotations

import torch

from .cases import TOKENS, expected
from .probe import Probe
from .records import Offers
from .registry import holds

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 130)


@holds("agreement", "o and the state are those of the definition, token by token", chapter=1)
def agreement(probe: Probe) -> None:
    """Ordinary and slow decays, in every dtype on offer."""
    for dtype in probe.implementation.offers.dtypes:
        for decays in ("ordinary", "slow"):
            probe.agrees(dtype=dtype, decays=decays)
    probe.agrees(B=3, T=70)


@holds("correlated keys", "the inverse of I + L must stand keys that point the same way", chapter=6)
def correlated_keys(probe: Probe) -> None:
    """Keys that share a direction, or are all the same: where a series for the inverse explodes (6.6)."""
    for dtype in probe.dtypes:
        for keys in ("correlated", "repeated"):
            for decays in ("slow", "ordinary") if probe.full else ("slow",):
                probe.agrees(dtype=dtype, keys=keys, decays=decays)


@holds("strong decay", "dividing by the cumulative decay overflows; differences of decays do not", chapter=7)
def strong_decay(probe: Probe) -> None:
    """g of about -5 and -30 at every token."""
    for dtype in probe.dtypes:
        for decays in ("strong", "deep"):
            probe.agrees(dtype=dtype, decays=decays)


@holds("small beside huge decay", "in one float32 sum a decay of -1000 takes the digits of the small ones", chapter=7)
def small_beside_huge(probe: Probe) -> None:
    """g of about -1000 at a fifth of the tokens, -0.01 at the others."""
    for dtype in probe.dtypes:
        probe.agrees(dtype=dtype, decays="huge_then_small")


@holds("exact reset", "g = -inf forgets everything before the token, without a NaN", chapter=7)
def exact_reset(probe: Probe) -> None:
    """alpha = 0 at a fifth of the tokens."""
    for dtype in probe.dtypes:
        probe.agrees(dtype=dtype, decays="reset")


@holds("no decay", "g = 0 is a legal decay: masks go by index, never by the value of the exponent", chapter=7)
def no_decay(probe: Probe) -> None:
    """g = 0 everywhere is the ungated delta rule; g = 0 at half of the tokens mixes both."""
    for dtype in probe.dtypes:
        for decays in ("none", "half"):
            probe.agrees(dtype=dtype, decays=decays)


@holds("negative eigenvalues", "beta up to 2 is what beta * |k|^2 < 2 allows", chapter=2, needs="large_beta")
def negative_eigenvalues(probe: Probe) -> None:
    """beta in (0, 2), random and correlated keys."""
    for keys in ("random", "correlated"):
        probe.agrees(beta="wide", keys=keys)


def _one_key(probe: Probe, beta: str, **recipe):
    """A recipe and its call with one key for all tokens, whose length is exactly 1 in every dtype; q = k, g = 0."""
    recipe = probe.fit(keys="repeated", decays="none", beta=beta, **recipe)
    call = probe.make(recipe)
    key = torch.zeros_like(call.k)
    key[..., :4] = torch.tensor([0.5, -0.5, 0.5, 0.5])  # 4 * 0.25 = 1
    return recipe, call._replace(q=key, k=key)


@holds("repeated key", "closed form: with one key and beta = 1 each write replaces the last, o_t = v_t", chapter=6)
def repeated_key(probe: Probe) -> None:
    """o_t = scale * v_t exactly (6.7); a squaring inverse is 1e17 off here."""
    for dtype in probe.dtypes:
        recipe, call = _one_key(probe, "one", dtype=dtype)
        with probe.case(recipe):
            o = probe.run(call).o
            probe.same(o, call.v.double() * recipe.K**-0.5, "o_t = scale * v_t", recipe)


@holds("reflection", "closed form: with one key and beta = 2 each token reflects the state, twice is nothing",
       chapter=2, needs="large_beta initial_state final_state")  # fmt: skip
def reflection(probe: Probe) -> None:
    """S_t = S_0 for even t (2.3); for odd t the part along the key has changed its sign."""
    for T in (130, 65):
        recipe, call = _one_key(probe, "two", T=T)
        call = call._replace(v=torch.zeros_like(call.v))
        with probe.case(recipe):
            _, state = probe.run(call)
            key, start = call.k[0, 0, 0].double(), call.initial_state.double()  # [K], [N,HV,K,V]
            along = torch.einsum("k,nhkv->nhv", key, start)[:, :, None] * key[:, None]
            probe.same(state, start - (2 * along if T % 2 else 0), f"state after {T} reflections", recipe)


@holds("lengths", "the last chunk is rarely full: its decay ends at the last token", chapter=5)
def lengths(probe: Probe) -> None:
    """Lengths around multiples of the usual chunks, final state included."""
    for T in LENGTHS:
        probe.agrees(T=T, decays="slow")


@holds("chunk size", "how tokens are grouped changes rounding and nothing else", chapter=5, needs="chunk_size")
def chunk_size(probe: Probe) -> None:
    """Every chunk size on offer."""
    for size in probe.implementation.offers.chunk_sizes:
        probe.agrees(options={"chunk_size": size}, note=f"chunk_size={size}", keys="correlated")


@holds("grouped heads", "value head h reads with key head h // (HV / H), for every ratio", chapter=11, needs="gva")
def grouped_heads(probe: Probe) -> None:
    """Ratios 2, 3, 4 and 8, with two key heads so that a wrong order of heads shows."""
    recipes = [dict(H=2, HV=2 * ratio, T=70) for ratio in (2, 3, 4, 8)]
    for recipe in probe.fitting(recipes, lambda r: r.HV > r.H, "asked with HV = H only"):
        probe.agrees(**recipe)


@holds("K other than V", "a width taken for the other goes unseen as long as both are equal", chapter=1, needs="widths")
def unequal_widths(probe: Probe) -> None:
    """K < V and K > V."""
    sizes = [(16, 32), (32, 16), (64, 32), (32, 48)] + [(64, 128), (128, 64), (16, 256)] * probe.full
    recipes = [dict(K=K, V=V, T=70) for K, V in sizes]
    for recipe in probe.fitting(recipes, lambda r: r.K != r.V, "asked with K = V only"):
        probe.agrees(**recipe)


@holds("odd widths", "heads that are no power of two must be padded or masked, not cut", chapter=1, needs="widths",
       full=True)  # fmt: skip
def odd_widths(probe: Probe) -> None:
    """8, 12, 24, 60 and 100."""
    recipes = [dict(K=width, V=width, T=70) for width in (8, 12, 24, 60, 100)]
    for recipe in probe.fitting(recipes, lambda r: r.K & (r.K - 1), "asked with powers of two only"):
        probe.agrees(**recipe)


@holds("width 128", "the width that models use takes tiles and code of its own", chapter=1)
def width_128(probe: Probe) -> None:
    """K = V = 128, more than two chunks."""
    for dtype in probe.dtypes:
        for keys in ("random", "correlated"):
            wide = [dict(K=128, V=128, keys=keys, decays="slow", dtype=dtype)]
            for recipe in probe.fitting(wide, lambda r: r.K == r.V == 128, "asked with other widths only"):
                probe.agrees(**recipe)


@holds("scale from K", "the default scale is K^-1/2, not V^-1/2", chapter=1, needs="default_scale widths")
def scale_from_k(probe: Probe) -> None:
    """K = 64, V = 16: the two differ by a factor of 2."""
    for recipe in probe.fitting([dict(K=64, V=16, T=33)], lambda r: r.K != r.V, "asked with K = V only"):
        probe.agrees(**recipe)


@holds("scale given", "another scale replaces K^-1/2, it does not multiply it", chapter=1, needs="scale")
def scale_given(probe: Probe) -> None:
    """scale = 0.7 and scale = 1."""
    for scale in (0.7, 1.0):
        probe.agrees(options={"scale": scale}, note=f"scale={scale}", T=33)


@holds("L2 norm", "eps stands inside the root, as in FLA and transformers; outside, small vectors differ", chapter=2)
def l2_norm(probe: Probe) -> None:
    """Queries and keys of any length, and tiny ones, where eps decides."""
    if not (probe.has("l2norm") or probe.has("normalises")):
        probe.refusals.append("no L2 norm")
        return
    for dtype in probe.dtypes:
        for keys in ("raw", "tiny"):
            probe.agrees(keys=keys, dtype=dtype, T=33, options={"l2norm": True}, note="l2norm")


@holds("causality", "no output knows of a later token", chapter=4)
def causality(probe: Probe) -> None:
    """Later tokens are replaced by others fifty times as large; the outputs before them stay."""
    for t in (1, 63, 64, 65, 100):
        recipe = probe.fit(note=f"tokens from {t} on replaced")
        with probe.case(recipe):
            call = probe.make(recipe)
            other = probe.make(recipe._replace(keys="correlated", decays="slow"))
            before = probe.run(call).o
            other = other._replace(v=50 * other.v)
            new = {n: torch.cat([getattr(call, n)[:, :t], getattr(other, n)[:, t:]], 1) for n in TOKENS}
            after = probe.run(call._replace(**new)).o
            probe.same(after[:, :t], before[:, :t], f"o before token {t}", recipe)


@holds("raw gates", "g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), in float32", chapter=7,
       needs="raw_gates")  # fmt: skip
def raw_gates(probe: Probe) -> None:
    """Ordinary gates, and a layer whose decays reach from next to nothing to e^-100."""
    for spread, top in ((1.0, 0.5), (2.0, 2.8)):
        _with_raw_gates(probe, f"a about {spread} N(0, 1), A_log up to {top}", spread, 0.0, (-1.0, top), 0.3)


@holds("extreme raw gates", "inf * 0 is NaN, and the state would keep it for good", chapter=7, needs="raw_gates")
def extreme_raw_gates(probe: Probe) -> None:
    """A_log = 100 with a = -200 (alpha = 1), and with a = 0 (alpha = 0)."""
    for a in (-200.0, 0.0):
        _with_raw_gates(probe, f"A_log=100, a={a:g}", 0.0, a, (100.0, 100.0), 0.0)


def _with_raw_gates(probe: Probe, note: str, spread: float, middle: float, A_log: tuple, dt_bias: float) -> None:
    """a about middle, as far as spread; A_log from one end to the other over the heads."""
    recipe = probe.fit(note=note, T=70)
    with probe.case(recipe):
        call = probe.make(recipe)
        x, b = call.v.float().mean(-1) * recipe.V**0.5, call.v[..., 0].float()  # [B,T,HV], about normal
        rates = torch.linspace(*A_log, recipe.HV, device=b.device)
        bias = torch.full_like(rates, dt_bias)
        call = call._replace(g=middle + spread * x, beta=b, A_log=rates, dt_bias=bias)
        probe.compare(probe.forward(call), expected(call), call, recipe)


@holds("dtypes", "o has the dtype of v, the state at least float32, and gates may be wider than q, k, v", chapter=7)
def dtypes(probe: Probe) -> None:
    """Output dtypes; 16-bit q, k, v with 16-bit beta; float64 in, float64 throughout where it is offered."""
    offers: Offers = probe.implementation.offers
    for dtype in offers.dtypes:
        recipe = probe.fit(dtype=dtype, T=33)
        with probe.case(recipe):
            call = probe.make(recipe)
            o, state = probe.run(call)
            probe.claim(o.dtype == call.v.dtype, f"o is {o.dtype}, v is {call.v.dtype}", recipe)
            if state is not None:
                probe.claim(state.dtype.itemsize >= 4, f"the state is {state.dtype}", recipe)
        if dtype in ("bfloat16", "float16"):
            mixed = recipe._replace(note=f"beta in {dtype} too")
            with probe.case(mixed):
                call = call._replace(beta=call.beta.to(call.v.dtype))
                probe.compare(probe.forward(call), expected(call), call, mixed)


@holds("long sequence", "rounding must not add up over thousands of tokens", chapter=7, full=True)
def long_sequence(probe: Probe) -> None:
    """4096 tokens that remember for thousands."""
    for dtype in probe.dtypes:
        probe.agrees(T=4096, decays="slow", dtype=dtype, keys="correlated")


@holds("keys of any length", "beta |k|^2 beyond 2 diverges by definition: nothing may be clamped", chapter=2, full=True)
def any_length(probe: Probe) -> None:
    """Sixteen tokens with keys four long; the state reaches 1e8 or more, and must be that."""
    if probe.has("normalises"):
        probe.refusals.append("keys of any length are normalised away")
        return
    probe.agrees(keys="raw", decays="none", T=16)
