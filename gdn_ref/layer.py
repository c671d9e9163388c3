"""GatedDeltaNet: the layer of a language model around the gated delta rule.

    x ── in_proj ─┬─ q, k, v ── short convolution ── SiLU ──┐
                  ├─ a, b: raw gates ───────────────────────┼── gated delta rule ── RMSNorm ── ⊙ SiLU(z) ── out_proj
                  └─ z: output gate ────────────────────────┘

The memory S is the rule's; all the rest acts on one token, but for the convolution, which sees the last few.
Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule" (Yang, Kautz, Hatamizadeh, 2024), section 3.4; the
step-size initialisation is Mamba-2's (Dao and Gu, 2024).  Chapter 13.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .arguments import FLOATS, INTEGERS, check_cu_seqlens, check_tensor
from .ops import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


class LayerCache(NamedTuple):
    """What a layer remembers of N sequences, whatever their length.

    conv [N, conv_size − 1, D]: the last inputs of the convolution; state [N, HV, K, V]: the memory S.
    """

    conv: Tensor
    state: Tensor


class RuleInputs(NamedTuple):
    """What the gated delta rule is given: q, k [B,T,H,K], not normalised; v [B,T,HV,V]; raw gates a, b [B,T,HV]."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor


# ---- the short convolution -------------------------------------------------------------------------------------------


def short_convolution(
    x: Tensor, weight: Tensor, history: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution: y_t = Σ_j weight[W−1−j] ⊙ x_{t−j}, j = 0 … W−1, inside each sequence.

    x [B,T,D]; weight [W,D]; history [N,W−1,D], the inputs before the first token of each sequence (None: zeros);
    cu_seqlens [N+1], int32 or int64, when sequences are packed along T with B = 1; else N = B.
    Returns y [B,T,D] and the history after the last token of each sequence, [N,W−1,D].  Differentiable.
    """
    B, T, D = x.shape
    W, N = len(weight), B if cu_seqlens is None else len(cu_seqlens) - 1
    if history is None:
        history = x.new_zeros(N, W - 1, D)
    if cu_seqlens is None:
        stream = torch.cat([history, x], dim=1)                 # [B, W−1+T, D]
        return _taps(stream, weight), stream[:, T:].clone()     # a view would keep all of the stream alive
    stream, token_rows, last_rows = _spread(x, history, cu_seqlens.to(x.device, torch.int64))
    return _taps(stream, weight)[:, token_rows - (W - 1)], stream[0, last_rows]


def _taps(stream: Tensor, weight: Tensor) -> Tensor:
    """Σ_j weight[j] ⊙ (stream from row j on): row r of the result has met rows r … r+W−1.  [B, R−W+1, D]"""
    rows = stream.shape[1] - len(weight) + 1
    y = weight[0] * stream[:, :rows]
    for j in range(1, len(weight)):
        y = torch.addcmul(y, weight[j], stream[:, j : j + rows])
    return y


def _spread(x: Tensor, history: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Packed sequences laid out with W−1 rows of history in front of each, so that no tap reaches a neighbour's tokens.

    Tokens beyond the last bound count as a sequence of their own.  Returns the stream [1, T + (N+1)(W−1), D], the row
    of each token [T] and of each sequence's last W−1 inputs [N, W−1].
    """
    (_, T, D), (N, gap, _) = x.shape, history.shape
    tokens = torch.arange(T, device=x.device)                   # [T]
    sequence = torch.searchsorted(cu_seqlens[1:], tokens, right=True)  # [T], 0 … N
    token_rows = tokens + gap * (sequence + 1)                  # [T]
    behind = gap * torch.arange(N, device=x.device)[:, None] + torch.arange(gap, device=x.device)  # [N, W−1]
    stream = x.new_zeros(1, T + (N + 1) * gap, D)
    stream[0, cu_seqlens[:-1, None] + behind] = history
    stream[:, token_rows] = x
    return stream, token_rows, cu_seqlens[1:, None] + behind


# ---- the norm after the rule -----------------------------------------------------------------------------------------


class GatedRMSNorm(nn.Module):
    """weight ⊙ o / rms(o) ⊙ SiLU(z), over the last axis.  o, z [..., V]."""

    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, o: Tensor, z: Tensor) -> Tensor:
        return F.rms_norm(o, (len(self.weight),), self.weight, self.eps) * F.silu(z)


# ---- the layer -------------------------------------------------------------------------------------------------------


class GatedDeltaNet(nn.Module):
    """Token mixing by a gated delta-rule memory of fixed size: what stands where attention would.

    d_model: width of x and y.  num_heads H, num_v_heads HV: query/key heads and value heads, HV % H == 0 (HV None: H).
    head_k_dim K, head_v_dim V: widths of one head (V None: K).  conv_size W: tokens that the convolution sees.
    allow_neg_eigval: β in (0, 2) instead of (0, 1).  chunk_size, backend: handed on to the rule.

    ``layer(x)`` returns ``(y, None)``; ``layer(x, output_cache=True)`` returns ``(y, cache)``, and ``layer(x, cache)``
    goes on from there: prefill in any pieces, then token by token, gives what one call over all tokens gives.  A cache
    is never changed in place, so an old one can be kept and gone back to.
    """

    def __init__(
        self, d_model: int, num_heads: int, num_v_heads: int | None = None, head_k_dim: int = 64,
        head_v_dim: int | None = None, conv_size: int = 4, *, norm_eps: float = 1e-6,
        allow_neg_eigval: bool = False, chunk_size: int = 64, backend: str = "auto",
    ):
        super().__init__()
        H, HV = num_heads, num_heads if num_v_heads is None else num_v_heads
        K, V = head_k_dim, head_k_dim if head_v_dim is None else head_v_dim
        _check_sizes(d_model=d_model, num_heads=H, num_v_heads=HV, head_k_dim=K, head_v_dim=V, conv_size=conv_size)
        self.d_model, self.H, self.HV, self.K, self.V = d_model, H, HV, K, V
        self.allow_neg_eigval, self.chunk_size, self.backend = allow_neg_eigval, chunk_size, backend
        self.mixed = 2 * H * K + HV * V                         # D, the channels that the convolution mixes: q, k, v
        self.in_proj = nn.Linear(d_model, self.mixed + HV * V + 2 * HV, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(conv_size, self.mixed))
        self.A_log = nn.Parameter(torch.empty(HV))
        self.dt_bias = nn.Parameter(torch.empty(HV))
        self.norm = GatedRMSNorm(V, norm_eps)
        self.out_proj = nn.Linear(HV * V, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the parameters: with a = 0 a head forgets at rate A·dt a token, A in [1, 16), dt in [1e-3, 1e-1]."""
        self.in_proj.reset_parameters()
        self.out_proj.reset_parameters()
        bound = len(self.conv_weight) ** -0.5
        self.conv_weight.uniform_(-bound, bound)
        self.A_log.uniform_(1, 16).log_()
        dt = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp_()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))   # the inverse of softplus: softplus(dt_bias) = dt

    def forward(
        self, x: Tensor, cache: LayerCache | None = None, *, attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None, output_cache: bool = False,
    ) -> tuple[Tensor, LayerCache | None]:
        """x [B,T,d_model] to y [B,T,d_model], and the cache after the last token if ``output_cache``, else None.

        cache: a LayerCache of N sequences to go on from (None: empty memories).
        cu_seqlens [N+1], int32 or int64: bounds of sequences packed along T, with B = 1.  Nothing passes a bound, be it
        through the memory or through the convolution.  Given bounds win: attention_mask is then not looked at.
        attention_mask [B,T], true or 1 at real tokens: pads write and forget nothing (k = v = β = g = 0), and the
        convolution sees zeros there, so a left-padded row gives what the row alone gives.  y at pads has no meaning.
        With ``output_cache`` the last token of each row must be a real one.
        Raises ValueError or TypeError naming the argument, what was found and what was expected.
        """
        mask = self._check(x, cache, attention_mask, cu_seqlens, output_cache)
        conv, state = (None, None) if cache is None else cache
        inputs, z, conv = self.rule_inputs(x, conv, mask, cu_seqlens)
        o, state = self.apply_rule(inputs, state, cu_seqlens, output_cache)
        y = self.out_proj(self.norm(o, z).flatten(-2))          # [B, T, d_model]
        return y, LayerCache(conv, state) if output_cache else None

    def rule_inputs(
        self, x: Tensor, history: Tensor | None = None, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[RuleInputs, Tensor, Tensor]:
        """(RuleInputs, z [B,T,HV,V], history [N,W−1,D]): all that comes before the rule.  mask [B,T] bool or None."""
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0)
        mixed, z, a, b = self.in_proj(x).split([self.mixed, self.HV * self.V, self.HV, self.HV], dim=-1)
        mixed, history = short_convolution(mixed, self.conv_weight, history, cu_seqlens)
        q, k, v = F.silu(mixed).split([self.H * self.K, self.H * self.K, self.HV * self.V], dim=-1)
        q, k = q.unflatten(-1, (self.H, self.K)), k.unflatten(-1, (self.H, self.K))
        v, z = v.unflatten(-1, (self.HV, self.V)), z.unflatten(-1, (self.HV, self.V))
        inputs = RuleInputs(q, k, v, a, b)
        return inputs if mask is None else _inert(inputs, ~mask), z, history

    def apply_rule(
        self, inputs: RuleInputs, state: Tensor | None = None, cu_seqlens: Tensor | None = None,
        output_final_state: bool = False, backend: str | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The rule with this layer's gates: o [B,T,HV,V], state [N,HV,K,V] or None.  backend None: the layer's own."""
        q, k, v, a, b = inputs
        options = dict(
            initial_state=state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
            use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=self.allow_neg_eigval,
            use_gate_in_kernel=True, A_log=self.A_log, dt_bias=self.dt_bias, backend=backend or self.backend,
        )
        if q.shape[1] == 1:                                     # one token: a chunk would be all overhead
            return fused_recurrent_gated_delta_rule(q, k, v, a, beta=b, **options)
        return chunk_gated_delta_rule(q, k, v, a, b, chunk_size=self.chunk_size, **options)

    def _check(self, x, cache, attention_mask, cu_seqlens, output_cache):
        """What is used before the rule's own checks, or is not its argument.  Returns the mask [B,T] bool, or None."""
        check_tensor("x", x, FLOATS, {"B": None, "T": None, "d_model": self.d_model})
        (B, T, _), gap = x.shape, len(self.conv_weight) - 1
        N = check_cu_seqlens(cu_seqlens, T, B)
        if cache is not None:
            check_tensor("cache.conv", cache.conv, FLOATS, {"N": N, "conv_size - 1": gap, "D": self.mixed})
            check_tensor("cache.state", cache.state, FLOATS, {"N": N, "HV": self.HV, "K": self.K, "V": self.V})
        if cu_seqlens is not None or attention_mask is None:
            return None
        check_tensor("attention_mask", attention_mask, (torch.bool, *INTEGERS, *FLOATS), {"B": B, "T": T})
        mask = attention_mask.bool()
        if output_cache and T and not mask[:, -1].all():
            raise ValueError("attention_mask: found a pad at the end of a row, expected left padding for a cache")
        return mask


def _inert(inputs: RuleInputs, pads: Tensor) -> RuleInputs:
    """The inputs with pads [B,T] that leave the memory as it was: k = v = 0, and gates for which β = 0 and g = 0."""
    token, head = pads[..., None], pads[..., None, None]
    closed = -float("inf")                                      # softplus(−∞) = 0 = sigmoid(−∞)
    return RuleInputs(
        inputs.q, inputs.k.masked_fill(head, 0), inputs.v.masked_fill(head, 0),
        inputs.a.masked_fill(token, closed), inputs.b.masked_fill(token, closed),
    )


def _check_sizes(**sizes):
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}: found {size!r}, expected an integer >= 1")
    H, HV = sizes["num_heads"], sizes["num_v_heads"]
    if HV % H:
        raise ValueError(f"num_v_heads: found {HV}, expected a multiple of num_heads, {H}")
