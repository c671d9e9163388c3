"""Inputs of every case, made from a small recipe, and the float64 recurrence that all of them are held against.

A recipe is what a report prints: it makes the same tensors again, anywhere.

    from gdn_ref.check.cases import Recipe, make
    call = make(Recipe(T=130, keys="correlated", decays="strong"))
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..gates import l2norm, raw_gates
from ..recurrent import recurrent_gated_delta_rule
from .records import Call, Offers

FLOOR = 1e-30  # a reference smaller than this is compared with it: float32 keeps no five digits below 1e-38
INF = float("inf")
TOKENS = ("q", "k", "v", "g", "beta")
LEAVES = (*TOKENS, "initial_state")

DECAYS = {
    "none": "g = 0 everywhere",
    "half": "g = 0 at a random half of the tokens, about -1 at the others",
    "slow": "g about -0.001",
    "ordinary": "what a fresh layer has: -A softplus(x), A in [1, e]",
    "strong": "g about -5",
    "deep": "g about -30",
    "huge_then_small": "g about -1000 at a fifth of the tokens, -0.01 at the others",
    "sparse": "g about -20 at every eighth token, -0.01 at the others",
    "reset": "g = -inf at a fifth of the tokens, -0.001 at the others",
}
SPARSE = slice(7, None, 8)  # the tokens of "sparse" that decay
KEYS = {
    "random": "unit keys in random directions",
    "correlated": "unit keys that share a direction (randn + 1, normalised)",
    "repeated": "one unit key for all tokens",
    "raw": "keys and queries of any length",
    "tiny": "keys and queries of length 0.0003",
}
STRENGTHS = {"unit": "beta in (0, 1)", "wide": "beta in (0, 2)", "one": "beta = 1", "two": "beta = 2"}
SPOKEN = {"none": "no decay", "half": "half of them no decay", "huge_then_small": "huge and small decays",
          "reset": "resets"}  # fmt: skip


class Recipe(NamedTuple):
    """What the inputs of a case are made from."""

    T: int = 130
    H: int = 2
    HV: int = 4
    K: int = 16
    V: int = 24
    B: int = 1
    keys: str = "random"
    decays: str = "ordinary"
    beta: str = "unit"
    lengths: tuple[int, ...] | None = None  # packed sequences; T is then their sum
    state: bool = True  # a random initial state
    dtype: str = "float32"  # of q, k, v; gates are float32, or float64 with float64
    note: str = ""  # what else the case does

    def text(self) -> str:
        """In words, for a report."""
        runs = [(n, len(list(same))) for n, same in itertools.groupby(self.lengths or ())]
        lengths = "+".join(str(n) if many == 1 else f"{many}x{n}" for n, many in runs)
        size = f"lengths {lengths}" if self.lengths else f"B={self.B} T={self.T}"
        words = [f"{size} H={self.H} HV={self.HV} K={self.K} V={self.V} {self.dtype}", f"{self.keys} keys",
                 SPOKEN.get(self.decays, f"{self.decays} decays"), STRENGTHS[self.beta]]  # fmt: skip
        words += [] if self.state else ["zero state"]
        return ", ".join([*words, self.note] if self.note else words)


def fit(recipe: Recipe, offers: Offers) -> Recipe:
    """The nearest recipe that the implementation takes: what it lacks and the case does not test is left out."""
    r, has = recipe, offers.features
    if r.lengths is not None:
        r = r._replace(B=1, T=sum(r.lengths))
    if offers.heads is not None and (r.H, r.HV) not in offers.heads:
        heads = [h for h in offers.heads if (h[0] < h[1]) == (r.H < r.HV)] or list(offers.heads)
        r = r._replace(H=heads[0][0], HV=heads[0][1])
    if "gva" not in has:
        r = r._replace(HV=r.H)
    if offers.widths is not None and (r.K, r.V) not in offers.widths:
        widths = [w for w in offers.widths if (w[0] < w[1]) == (r.K < r.V)] or list(offers.widths)
        r = r._replace(K=widths[0][0], V=widths[0][1])
    if "widths" not in has and r.K != r.V:
        r = r._replace(V=r.K)
    if "initial_state" not in has:
        r = r._replace(state=False)
    if "batch" not in has:
        r = r._replace(B=1)
    if "large_beta" not in has and r.beta in ("wide", "two"):
        r = r._replace(beta="unit")
    return r if r.dtype in offers.dtypes else r._replace(dtype=offers.dtypes[0])


# ---- tensors ---------------------------------------------------------------------------------------------------------


class Source:
    """Random numbers from a label: a case keeps its own when others are added. Made on the CPU, in float64."""

    def __init__(self, *label):
        self.generator = torch.Generator().manual_seed(zlib.crc32(repr(label).encode()))

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        """Numbers in [0, 1)."""
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)


def unit(x: Tensor) -> Tensor:
    """Vectors of the last axis at length 1."""
    return x / x.norm(dim=-1, keepdim=True).clamp_min(FLOOR)


def make(recipe: Recipe, device: str = "cpu") -> Call:
    """The tensors of a recipe, each rounded to the dtype it is passed in."""
    r = recipe
    if r.lengths is not None:
        r = r._replace(T=sum(r.lengths), lengths=tuple(r.lengths))  # JSON makes a list of it
    source = Source(*r._replace(dtype="", note=""))  # the same numbers in every dtype
    narrow, wide = getattr(torch, r.dtype), torch.float64 if r.dtype == "float64" else torch.float32
    q, k = _queries(r, source), _keys(r, source)
    v, g = source.normal(r.B, r.T, r.HV, r.V), _decays(r, source)
    beta = _strengths(r, source)
    N = r.B if r.lengths is None else len(r.lengths)
    state = source.normal(N, r.HV, r.K, r.V).to(device, wide) if r.state else None
    bounds = None if r.lengths is None else torch.tensor([0, *itertools.accumulate(r.lengths)], device=device)
    q, k, v = (x.to(device, narrow) for x in (q, k, v))
    g, beta = (x.to(device, wide) for x in (g, beta))
    return Call(q, k, v, g, beta, initial_state=state, cu_seqlens=bounds)


def _queries(r: Recipe, source: Source) -> Tensor:
    x = source.normal(r.B, r.T, r.H, r.K)
    lengths = {"raw": r.K**0.5, "tiny": 3e-4}
    return unit(x + (r.keys == "correlated")) * lengths.get(r.keys, 1.0)


def _keys(r: Recipe, source: Source) -> Tensor:
    if r.keys == "repeated":
        return unit(source.normal(r.B, 1, r.H, r.K)).repeat(1, r.T, 1, 1)
    return _queries(r, source)


def _decays(r: Recipe, source: Source) -> Tensor:
    """Log decays [B,T,HV]; never one value throughout, which would sum without rounding."""
    shape = (r.B, r.T, r.HV)
    jitter, fifth = 0.5 + source.uniform(*shape), source.uniform(*shape) < 0.2
    if r.decays == "none":
        return torch.zeros(*shape, dtype=torch.float64)
    if r.decays == "half":
        return torch.where(source.uniform(*shape) < 0.5, 0.0, -jitter)
    if r.decays == "ordinary":
        return -torch.exp(source.uniform(1, 1, r.HV)) * softplus(source.normal(*shape))
    if r.decays == "huge_then_small":
        return torch.where(fifth, -1000 * jitter, -0.01 * jitter)
    if r.decays == "sparse":  # within a factor e of one another: were they further apart, one would be their norm
        g = -0.01 * jitter
        g[:, SPARSE] = -19 - jitter[:, SPARSE]
        return g
    if r.decays == "reset":
        return torch.where(fifth, -INF, -1e-3 * jitter)
    return {"slow": -1e-3, "strong": -5.0, "deep": -30.0}[r.decays] * jitter


def _strengths(r: Recipe, source: Source) -> Tensor:
    beta = source.uniform(r.B, r.T, r.HV)
    return {"unit": beta, "wide": 2 * beta, "one": torch.ones_like(beta), "two": 2 * torch.ones_like(beta)}[r.beta]


# ---- the definition --------------------------------------------------------------------------------------------------


def widened(call: Call) -> Call:
    """The very numbers of a call in float64 on the CPU, where the reference is computed."""
    wide = [x.detach().cpu() if isinstance(x, Tensor) else x for x in call]
    return Call(*(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in wide))


def definition(call: Call) -> tuple[Tensor, Tensor]:
    """o [B,T,HV,V] and the state [N,HV,K,V] of a float64 call, token by token (1.1); differentiable."""
    q, k, g, beta = call.q, call.k, call.g, call.beta
    if call.A_log is not None:
        g, beta = raw_gates(g, beta, call.A_log, call.dt_bias)
    if call.l2norm:
        q, k = l2norm(q), l2norm(k)
    N = call.v.shape[0] if call.cu_seqlens is None else len(call.cu_seqlens) - 1
    state = call.initial_state
    if state is None:
        state = call.v.new_zeros(N, call.v.shape[2], q.shape[-1], call.v.shape[-1])
    elif call.state_v_first:
        state = state.mT
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    o, state = recurrent_gated_delta_rule(q, k, call.v, g, beta, scale, state, call.cu_seqlens)
    return o, state.mT if call.state_v_first else state


def upstream(o: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Fixed random gradients of o and of the state; bfloat16 numbers, which reach every output dtype unrounded."""
    source = Source("upstream", tuple(o.shape))
    return tuple(source.normal(*x.shape).bfloat16().double() for x in (o, state))


def gradients(o: Tensor, state: Tensor | None, leaves: dict[str, Tensor], like: tuple) -> dict[str, Tensor]:
    """{"dq": ..., "dk": ...} of the fixed upstream gradients; an input that nothing depends on gets 0."""
    loss = (o.double() * like[0].to(o.device)).sum()
    if state is not None:
        loss = loss + (state.double() * like[1].to(o.device)).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {"d" + name: torch.zeros_like(leaves[name]) if d is None else d
            for name, d in zip(leaves, found, strict=True)}  # fmt: skip


def with_leaves(call: Call) -> tuple[Call, dict[str, Tensor]]:
    """The call with fresh leaves that want a gradient, and those leaves by name."""
    leaves = {n: getattr(call, n).detach().requires_grad_() for n in LEAVES if getattr(call, n) is not None}
    return call._replace(**leaves), leaves


def expected(call: Call, wanted: bool = False, with_state: bool = True) -> dict[str, Tensor]:
    """o, state and, if wanted, every gradient of a call by the float64 definition. with_state: the state counts."""
    wide = widened(call)
    if not wanted:
        with torch.no_grad():
            return dict(zip(("o", "state"), definition(wide), strict=True))
    wide, leaves = with_leaves(wide)
    o, state = definition(wide)
    found = gradients(o, state if with_state else None, leaves, upstream(o, state))
    return {"o": o.detach(), "state": state.detach(), **found}


# ---- comparison ------------------------------------------------------------------------------------------------------


def relative_l2(found: Tensor, right: Tensor, call: Call, kind: str) -> Tensor:
    """Relative L2 error of each sequence and head [N, heads]; NaN counts as infinite. kind: "state" or "token"."""
    difference = found.detach().cpu().double() - right
    error = _norms(difference, call, kind) / _norms(right, call, kind).clamp_min(FLOOR)
    return error.nan_to_num(nan=INF)


def _norms(x: Tensor, call: Call, kind: str) -> Tensor:
    if kind == "state":
        return x.flatten(2).norm(dim=2)
    x = x.flatten(3) if x.dim() > 3 else x[..., None]
    if call.cu_seqlens is None:
        return x.square().sum((1, 3)).sqrt()
    pieces = itertools.pairwise([*call.cu_seqlens.tolist(), x.shape[1]])  # the last: tokens of no sequence
    return torch.stack([x[0, a:b].square().sum((0, 2)).sqrt() for a, b in pieces])


def conditioning(call: Call, right: dict, names: list[str], unit_roundoff: float, reference: Callable) -> dict:
    """{name: change [N, heads] of the exact gradients when the inputs move by half a unit in their last place}.

    reference: gives the exact ones of a float64 call. Root mean square of four tries. Where it is large the problem
    itself asks for more digits than the inputs carry.
    """
    wide, tries = widened(call), []
    for n in range(4):
        source = Source("rounding", n)
        moved = {m: getattr(wide, m) for m in LEAVES if getattr(wide, m) is not None}
        moved = {m: x * (1 + unit_roundoff * torch.sign(source.normal(*x.shape))) for m, x in moved.items()}
        found = reference(wide._replace(**moved))
        tries.append({m: relative_l2(found[m], right[m], call, kind_of(m)) for m in names})
    return {m: torch.stack([t[m] for t in tries]).square().mean(0).sqrt() for m in names}


def kind_of(name: str) -> str:
    """How a tensor of this name is cut into sequences and heads."""
    return "state" if name in ("state", "dinitial_state") else "token"
