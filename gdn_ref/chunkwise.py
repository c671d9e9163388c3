"""Chunkwise form in torch: the stages of the forward pass one by one, and the pass that the op runs.

The stages take tokens as they arrive ([B,T,HV,...], packed or not) and read like the book:

    chunk_local_cumsum -> chunk_scaled_dot_kkt_fwd -> solve_tril -> recompute_w_u_fwd -> chunk_states -> chunk_output

The pass that the op runs takes the same steps for a group of chunks at a time, small enough that what lies between two
products stays in the cache: prepare_chunks all that needs no state, scan_chunks the rest, chunk by chunk. Autograd
differentiates it; without gradients it writes into memory that is used again from group to group.

Book: chapters 3 to 7.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import FLOATS, STAGE_AXES, check_stage, check_tensor
from .chunks import (
    Slots,
    fitting_chunk,
    power_of_two,
    prepare_chunk_indices,
    scan_batches,
    slots_of,
    to_chunks,
    to_tokens,
)
from .gates import at_least_float32

LOG2E = math.log2(math.e)
# A decay below this is 0 in float32 (float64), so that anything smaller is the same reset; kept finite for the sums.
SMALLEST_LOG_DECAY = {torch.float32: -128.0, torch.float64: -1024.0}
LARGEST_CHUNK = 64
# Chunks times heads that are prepared together: a few MB of temporaries, which the cache holds.
GROUP_ROWS = 128
# Places (tokens times heads) that one step of the scan may hold, so that memory stays bounded for large batches.
STEP_PLACES = 2**17


# ----------------------------------------------------------------------------------------------- equations on chunks


def cumulative_decay(g: Tensor) -> Tensor:
    """G_i = log2(e) (g_1 + ... + g_i) in float64 (7.2). [..., C] -> [..., C].

    Only differences of G are used, and beside a large decay the small ones would vanish from a float32 sum; so the sum
    is kept in float64, and a decay that underflows counts as the reset that it is (7.5).
    """
    return g.clamp(min=SMALLEST_LOG_DECAY[g.dtype]).double().cumsum(-1) * LOG2E  # (7.2)


def decay_matrix(G: Tensor, dtype: torch.dtype) -> Tensor:
    """Gamma_ij = 2^(G_i - G_j) at and below the diagonal, else 0. [..., C] float64 -> [..., C, C]   (7.1)

    Every G is split into a whole number, whose differences float32 holds exactly, and a rest below 1, whose power is a
    factor of the row or the column: so the relative error stays near 1e-7 however far the decays reach. The exponent is
    masked before exp2, by index: a difference above the diagonal may overflow.
    """
    C, whole = G.shape[-1], G.round()
    rest, whole = (G - whole).to(dtype), whole.to(dtype)
    mask = torch.full((C, C), -math.inf, dtype=dtype, device=G.device).triu(1)
    exponent = (whole[..., :, None] - whole[..., None, :]).add_(mask)
    return exponent.exp2_().mul_(rest.exp2()[..., :, None]).mul_((-rest).exp2()[..., None, :])  # (7.1)


class Decays(NamedTuple):
    Gamma: Tensor  # [..., C, C] decay between any two tokens of a chunk, 1 on the diagonal
    gamma: Tensor  # [..., C] since the chunk's start
    tail: Tensor  # [..., C] up to the chunk's end


class ChunkDecays(torch.autograd.Function):
    """All three decays of a chunk from its g [..., C] (natural log).

    Its gradient adds up just the pairs that a decay lies between: g_t meets Gamma_ij where j < t <= i. The sum over
    rows less the sum over columns says the same, but large shares cancel there, and a small gradient drowns in noise.
    """

    @staticmethod
    def forward(ctx, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        G = cumulative_decay(g)
        decays = (decay_matrix(G, g.dtype), G.exp2().to(g.dtype), (G[..., -1:] - G).exp2().to(g.dtype))
        ctx.save_for_backward(*decays)
        return decays

    @staticmethod
    def backward(ctx, *upstream: Tensor) -> Tensor:
        pairs, starts, ends = (d * x for d, x in zip(upstream, ctx.saved_tensors, strict=True))
        between = pairs.cumsum(-1)[..., 1:, :-1].tril().sum(-2)  # the sum over j < t <= i, for t = 2 .. C
        dg = starts.flip(-1).cumsum(-1).flip(-1)
        return dg + F.pad(between + ends.cumsum(-1)[..., :-1], (1, 0))


class UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 for L [M, C, C]; only what lies below the diagonal of L is read.

    Forward substitution (6.3). No power of L is ever formed: for repeated keys those reach 1e18 while the inverse stays
    near 1 (6.6), (6.7).
    """

    @staticmethod
    def forward(ctx, L: Tensor) -> Tensor:
        eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
        # On the transpose, which is how LAPACK stores it: neither L nor the result is copied.
        X = torch.linalg.solve_triangular(L.mT, eye, upper=True, unitriangular=True).mT  # (6.3)
        ctx.save_for_backward(X)
        return X

    @staticmethod
    def backward(ctx, dX: Tensor) -> Tensor:
        (X,) = ctx.saved_tensors
        return -(X.mT @ dX @ X.mT).tril(-1)  # d(X) = -X dL X


# ----------------------------------------------------------------------------------------- the pass that the op runs


class Buffers:
    """Memory that is used again from chunk to chunk; None, that is fresh memory, where autograd needs every value."""

    def __init__(self, reuse: bool, like: Tensor, dtype: torch.dtype):
        self._reuse, self._like, self._dtype, self._kept = reuse, like, dtype, {}

    def __call__(self, name: str, *shape: int) -> Tensor | None:
        if not self._reuse:
            return None
        kept = self._kept.get(name)
        if kept is None or kept.shape != shape:
            kept = self._kept[name] = self._like.new_empty(shape, dtype=self._dtype)
        return kept

    def copy(self, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x in its own contiguous memory and the given dtype."""
        kept = self(name, *x.shape)
        return x.to(dtype).contiguous() if kept is None else kept.copy_(x)

    def scale(self, x: Tensor, factor: Tensor) -> Tensor:
        """x * factor, in the place of x where memory is used again."""
        return x.mul_(factor) if self._reuse else x * factor

    def add_product(self, x: Tensor, a: Tensor, b: Tensor, alpha: float = 1) -> Tensor:
        """x + alpha a @ b, in the place of x where memory is used again."""
        return x.baddbmm_(a, b, alpha=alpha) if self._reuse else torch.baddbmm(x, a, b, alpha=alpha)


class Prepared(NamedTuple):
    """What a group of chunks needs before its states are known; M = chunks * HV rows."""

    w: Tensor  # [M, C, K] A diag(beta gamma) K
    u: Tensor  # [M, C, V] A diag(beta) V; the scan turns it into E where nothing is differentiated
    q: Tensor  # [M, C, K]
    kT: Tensor  # [M, K, C]
    gamma: Tensor  # [M, C, 1] decay since the chunk's start
    tail: Tensor  # [M, C, 1] decay up to the chunk's end
    scores: Tensor  # [M, C, C] Gamma * (Q K^T)


def prepare_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, buffer: Buffers) -> Prepared:
    """Everything that does not depend on the state, for all chunks of a group at once.

    q, k: [m,C,H,K]; v: [m,C,HV,V]; g (natural log), beta: [m,C,HV] in the dtype of the arithmetic. Products with keys
    are taken once a key head; its R = HV/H value heads share them.
    """
    (m, C, H, K), (HV, V) = k.shape, v.shape[2:]
    R, dtype = HV // H, beta.dtype
    g, beta = (x.transpose(1, 2).reshape(m, H, R, C) for x in (g, beta))
    Gamma, gamma, tail = ChunkDecays.apply(g)
    gamma, tail, beta = gamma[..., None], tail[..., None], beta[..., None]  # [m, H, R, C, 1]
    # Rows of keys serve W alone and come scaled; everything else takes them as columns, since a product with a
    # transposed view is half as fast.
    q, kT = buffer.copy("q", q.transpose(1, 2), dtype), buffer.copy("kT", k.permute(0, 2, 3, 1), dtype)
    A, scores = _intra_chunk(q, kT, Gamma, beta, buffer)
    keys = torch.mul(k.transpose(1, 2)[:, :, None], beta * gamma, out=buffer("keys", m, H, R, C, K))
    values = torch.mul(v.transpose(1, 2).unflatten(1, (H, R)), beta, out=buffer("values", m, H, R, C, V))
    w = torch.bmm(A, keys.reshape(-1, C, K), out=buffer("w", m * HV, C, K))  # (5.3)
    u = torch.bmm(A, values.reshape(-1, C, V), out=buffer("u", m * HV, C, V))  # (5.3)
    q, kT = (x[:, :, None].expand(m, H, R, *x.shape[2:]) for x in (q, kT))
    return Prepared(w, u, *(x.flatten(0, 2) for x in (q, kT, gamma, tail)), scores)


def _intra_chunk(q: Tensor, kT: Tensor, Gamma: Tensor, beta: Tensor, buffer: Buffers) -> tuple[Tensor, Tensor]:
    """(I + Gamma * L)^-1 and Gamma * (Q K^T), both [M,C,C]; q [m,H,C,K], kT [m,H,K,C], Gamma [m,H,R,C,C]."""
    m, H, _, C = kT.shape
    shape, q, kT = Gamma.shape, q.flatten(0, 1), kT.flatten(0, 1)
    products = torch.bmm(kT.mT, kT, out=buffer("products", m * H, C, C)).view(m, H, 1, C, C)
    L = torch.mul(products, Gamma, out=buffer("L", *shape))
    L = buffer.scale(L, beta)
    A = UnitLowerInverse.apply(L.view(-1, C, C))  # (5.2)
    products = torch.bmm(q, kT, out=buffer("products", m * H, C, C)).view(m, H, 1, C, C)
    return A, buffer.scale(Gamma, products).view(-1, C, C)  # (5.5)


class Scanned(NamedTuple):
    o: Tensor  # [M, C, V] not scaled yet
    ended: list[Tensor]  # states of the sequences that ended, the longest first
    state: Tensor  # [n*HV, K, V] of the others


def scan_chunks(chunks: Prepared, state: Tensor, rows: list[int], buffer: Buffers) -> Scanned:
    """Carry the state through a group of chunks, step by step; sequences that have ended drop out from behind.

    state: [n*HV,K,V]; rows: heads times sequences at each step, never rising.
    """
    o = buffer("o", *chunks.u.shape)
    targets = [None] * len(rows) if o is None else o.split(rows)
    outputs, deltas, ended = [], [], []
    for w, u, q, kT, gamma, tail, target in zip(*(x.split(rows) for x in chunks[:6]), targets, strict=True):
        if len(w) < len(state):
            ended, state = [state[len(w) :].clone(), *ended], state[: len(w)]
        outputs.append(buffer.scale(torch.bmm(q, state, out=target), gamma))  # diag(gamma) Q S   (5.5)
        delta = buffer.add_product(u, w, state, alpha=-1)  # E = U - W S   (5.4)
        late = torch.mul(tail, delta, out=buffer("late", *delta.shape))
        state = torch.mul(gamma[:, -1:], state, out=buffer("state", *state.shape))
        state = buffer.add_product(state, kT, late)  # (5.6)
        deltas.append(delta)
    o, delta = (torch.cat(outputs), torch.cat(deltas)) if o is None else (o, chunks.u)
    return Scanned(buffer.add_product(o, chunks.scores, delta), ended, state)  # (5.5)


def _run_batch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, counts: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Chunks [NC,C,...] in the order of the scan and states [n,HV,K,V] -> outputs [NC,C,HV,V] and states."""
    reuse = not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, g, beta, state)))
    buffer = Buffers(reuse, v, state.dtype)
    NC, C, HV, V = v.shape
    groups = _groups(counts, HV)
    sizes = [sum(group) for group in groups]
    tokens = state.new_empty(v.shape) if reuse else None
    shape, state = state.shape, state.flatten(0, 1)
    outputs, ended = [], []
    targets = [None] * len(groups) if tokens is None else tokens.split(sizes)
    for group, target, *inputs in zip(groups, targets, *(x.split(sizes) for x in (q, k, v, g, beta)), strict=True):
        chunks = prepare_chunks(*inputs, buffer)
        o, done, state = scan_chunks(chunks, state, [count * HV for count in group], buffer)
        o = o.view(-1, HV, C, V).transpose(1, 2)  # [m, C, HV, V]
        outputs.append(torch.mul(o, scale, out=target))
        ended = done + ended
    o = torch.cat(outputs) if tokens is None else tokens
    return o, torch.cat([state, *ended]).view(shape)


def _groups(counts: list[int], HV: int) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    for count in counts:
        if groups[-1] and (sum(groups[-1]) + count) * HV > GROUP_ROWS:
            groups.append([])
        groups[-1].append(count)
    return groups


def chunkwise_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The whole forward pass, by chunks; the same meaning and arguments as recurrent_gated_delta_rule.

    q, k: [B,T,H,K]; v: [B,T,HV,V], any floating dtype; g (natural log), beta: [B,T,HV] and initial_state [N,HV,K,V]
    in the dtype of the arithmetic; cu_seqlens: [N+1] on the CPU for packed input (B = 1). Returns o [B,T,HV,V] in
    that dtype and the states [N,HV,K,V]. Arguments are not checked here: see ops.py. Source: Gated Delta Networks
    (arXiv 2412.06464) section 3.3, with Gamma for the mask of its output; book (5.3) to (5.6).
    """
    # Chunks much longer than keys are wide cost more, and round worse: so many writes into so few directions all but
    # cancel in I - K^T W. Beyond 64 tokens the same is true of any width.
    chunk_size = min(chunk_size, LARGEST_CHUNK, max(16, power_of_two(2 * k.shape[-1])))
    run = _run_dense if cu_seqlens is None else _run_packed
    return run(q, k, v, g, beta, scale, initial_state, cu_seqlens, chunk_size)


def _run_dense(q, k, v, g, beta, scale, state, _, chunk_size):
    B, T, HV, V = v.shape
    if not T or not B:
        return v.to(state.dtype), state.clone()
    C = fitting_chunk(chunk_size, T)
    NT = -(-T // C)
    outputs, states = [], []
    for rows in torch.arange(B).split(max(1, STEP_PLACES // (C * HV))):
        b, here = len(rows), slice(int(rows[0]), int(rows[-1]) + 1)
        parts = (_steps_first(x[here], NT, C) for x in (q, k, v, g, beta))
        o, final = _run_batch(*parts, state[here], [b] * NT, scale)
        outputs.append(o.reshape(NT, b, C, HV, V).transpose(0, 1).reshape(b, NT * C, HV, V)[:, :T])
        states.append(final)
    return (torch.cat(outputs), torch.cat(states)) if len(outputs) > 1 else (outputs[0], states[0])


def _steps_first(x: Tensor, NT: int, C: int) -> Tensor:
    """[b, T, ...] -> [NT*b, C, ...]: all first chunks, then all second ones; a view for b = 1, whole chunks."""
    missing = NT * C - x.shape[1]
    x = F.pad(x, [0, 0] * (x.dim() - 2) + [0, missing]) if missing else x
    return x.unflatten(1, (NT, C)).transpose(0, 1).flatten(0, 1)


def _run_packed(q, k, v, g, beta, scale, state, cu_seqlens, chunk_size):
    T, HV, V = v.shape[1:]
    bounds = cu_seqlens.cpu().long()
    batches = scan_batches(bounds.diff(), bounds[:-1], chunk_size, max(1, STEP_PLACES // HV))
    if not batches:
        return v.to(state.dtype).masked_fill(torch.ones_like(v, dtype=torch.bool), 0), state.clone()
    token = torch.cat([batch.slots.token.flatten() for batch in batches]).to(v.device)
    inside = torch.cat([batch.slots.inside.flatten() for batch in batches]).to(v.device)
    q, k, v, g, beta = (x[0].index_select(0, token) for x in (q, k, v, g, beta))  # [places, ...]
    g, beta = (torch.where(inside[:, None], x, 0) for x in (g, beta))
    sizes = [batch.slots.token.numel() for batch in batches]
    outputs, states = [], []
    for batch, *parts in zip(batches, *(x.split(sizes) for x in (q, k, v, g, beta)), strict=True):
        parts = (x.unflatten(0, (-1, batch.chunk_size)) for x in parts)
        o, final = _run_batch(*parts, state[batch.sequences.to(v.device)], batch.counts, scale)
        outputs.append(o.flatten(0, 1))
        states.append(final)
    o = state.new_zeros(T, HV, V).index_copy(0, token[inside], torch.cat(outputs)[inside])
    moved = torch.cat([batch.sequences for batch in batches]).to(v.device)
    return o[None], state.index_copy(0, moved, torch.cat(states))


# -------------------------------------------------------------------------------- the stages, one by one, on tokens


def chunk_local_cumsum(
    g: Tensor,
    chunk_size: int = 64,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_indices: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Cumulative sum of g within each chunk, times scale. [B,T,HV] -> [B,T,HV].

    g: log decays; with scale = log2(e) the result is in log2, as the later stages read it. reverse sums from
    the chunk's end. cu_seqlens: [N+1] for packed input (B = 1); chunk_indices: [NC,2], made from it where missing. The
    sum is taken in float64 with underflowing decays as resets (7.5) and returned in output_dtype (default float32, or
    float64 for float64), where decays far apart in size lose what a float32 cannot hold.
    """
    check_stage(cu_seqlens, chunk_size, g=g)
    dtype = at_least_float32(g.dtype)
    slots = slots_of(g.shape[1], chunk_size, cu_seqlens, chunk_indices, g.device)
    chunks = _head_chunks(g.to(dtype), slots)  # [B, NC, HV, C]
    G = cumulative_decay(chunks.flip(-1)).flip(-1) if reverse else cumulative_decay(chunks)  # in log2
    return _tokens(G * ((1 if scale is None else scale) / LOG2E), slots, g.shape[1]).to(output_dtype or dtype)


def chunk_scaled_dot_kkt_fwd(
    k: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    output_dtype: torch.dtype | None = None,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Row i, column j < i of a chunk: beta_i 2^(g_i - g_j) k_i . k_j; zero elsewhere. -> [B,T,HV,C]   (5.2)

    k: [B,T,H,K]; g: within-chunk cumulative log2 decays [B,T,HV] or None; beta: [B,T,HV]; C = chunk_size. One row of
    the chunk's matrix a token, so that the block of a chunk is a [C, C] view.
    """
    if beta is None:
        raise TypeError("beta: found None, expected a tensor [B, T, HV]")
    check_stage(cu_seqlens, chunk_size, k=k, g=g, beta=beta)
    dtype = at_least_float32(k.dtype)
    T, R = k.shape[1], beta.shape[2] // k.shape[2]
    slots = slots_of(T, chunk_size, cu_seqlens, chunk_indices, k.device)
    keys = _head_chunks(k.to(dtype), slots)  # [B, NC, H, C, K]
    products = (keys @ keys.mT).repeat_interleave(R, 2)  # [B, NC, HV, C, C]
    L = (products * _head_chunks(beta.to(dtype), slots)[..., None]).tril(-1)
    if g is not None:
        L = L * decay_matrix(_chunk_decay(g, slots), dtype)
    return _tokens(L, slots, T).to(output_dtype or dtype)


def solve_tril(
    A: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """(I + A)^-1 of every chunk's strictly lower block, [B,T,HV,C] -> [B,T,HV,C]   (6.3), (6.4)."""
    check_stage(cu_seqlens, _width("A", A), A=A)
    dtype, (T, _, C) = at_least_float32(A.dtype), A.shape[1:]
    slots = slots_of(T, C, cu_seqlens, chunk_indices, A.device)
    blocks = _head_chunks(A.to(dtype), slots)  # [B, NC, HV, C, C]
    inverse = UnitLowerInverse.apply(blocks.reshape(-1, C, C)).view(blocks.shape)
    return _tokens(inverse, slots, T).to(output_dtype or dtype)


class WU(NamedTuple):
    w: Tensor  # [B,T,HV,K] effective keys
    u: Tensor  # [B,T,HV,V] effective values


def recompute_w_u_fwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    g: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> WU:
    """The WY factors of every chunk: w = A (beta 2^g k), u = A (beta v)   (5.3)

    k: [B,T,H,K]; v: [B,T,HV,V]; beta: [B,T,HV]; A: inverted blocks [B,T,HV,C] from solve_tril, C the chunk size;
    g: within-chunk cumulative log2 decays [B,T,HV], or None; cu_seqlens: [N+1] for packed input; chunk_indices:
    [NC,2], derived from cu_seqlens when omitted. Returns (w [B,T,HV,K], u like v), w in k's dtype. Log2 is the
    meaning that Megatron and fla-core from 0.5.1 give this name; earlier fla-core, vLLM and SGLang take natural logs.
    """
    check_stage(cu_seqlens, _width("A", A), k=k, v=v, beta=beta, A=A, g=g)
    dtype, (T, HV, C) = at_least_float32(A.dtype), A.shape[1:]
    slots = slots_of(T, C, cu_seqlens, chunk_indices, k.device)
    k_, v_, b_, A_ = (_head_chunks(x.to(dtype), slots) for x in (k, v, beta, A))
    k_, b_ = k_.repeat_interleave(HV // k.shape[2], 2), b_[..., None]
    gamma = 1 if g is None else _chunk_decay(g, slots).to(dtype).exp2()[..., None]
    w, u = A_ @ (b_ * gamma * k_), A_ @ (b_ * v_)  # (5.3)
    return WU(_tokens(w, slots, T).to(k.dtype), _tokens(u, slots, T).to(v.dtype))


class ChunkStates(NamedTuple):
    h: Tensor  # [B,NC,HV,K,V] the state at the start of every chunk
    delta: Tensor  # [B,T,HV,V] E = U - W S, what each token writes
    final_state: Tensor  # [N,HV,K,V]


def chunk_states(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_size: int = 64,
) -> ChunkStates:
    """From chunk to chunk: E = U - W S, then S <- gamma_C S + (diag(gamma_C / gamma) K)^T E   (5.4), (5.6)

    k: [B,T,H,K]; w: [B,T,HV,K]; u: [B,T,HV,V]; g: within-chunk cumulative log2 decays [B,T,HV] or None;
    initial_state: [N,HV,K,V] or None.
    """
    check_stage(cu_seqlens, chunk_size, k=k, w=w, u=u, g=g)
    dtype, (B, T, HV, V), K = at_least_float32(w.dtype), u.shape, k.shape[-1]
    if cu_seqlens is not None and chunk_indices is None:
        chunk_indices = prepare_chunk_indices(cu_seqlens, chunk_size)
    slots = slots_of(T, chunk_size, cu_seqlens, chunk_indices, k.device)
    k, w, u = (_head_chunks(x.to(dtype), slots) for x in (k.repeat_interleave(HV // k.shape[2], 2), w, u))
    NC = k.shape[1]
    G = k.new_zeros(k.shape[:-1]) if g is None else _chunk_decay(g, slots)  # [B, NC, HV, C]
    late = (G[..., -1:] - G).to(dtype).exp2()[..., None] * k  # diag(gamma_C / gamma) K
    gamma_C = G[..., -1:].to(dtype).exp2()[..., None]
    owner = [[b] * NC for b in range(B)] if cu_seqlens is None else [chunk_indices[:, 0].tolist()]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    S = list((k.new_zeros(N, HV, K, V) if initial_state is None else initial_state.to(dtype)).unbind(0))
    h, delta = [k.new_zeros(0, HV, K, V)], [u.new_zeros(0, HV, slots.token.shape[1], V)]
    for b, c in ((b, c) for b in range(B) for c in range(NC)):
        n = owner[b][c]
        h.append(S[n][None])
        delta.append((u[b, c] - w[b, c] @ S[n])[None])  # (5.4)
        S[n] = gamma_C[b, c] * S[n] + late[b, c].mT @ delta[-1][0]  # (5.6)
    h, delta = (torch.cat(x).unflatten(0, (B, NC)) for x in (h, delta))
    return ChunkStates(h, _tokens(delta, slots, T), torch.stack(S))


def chunk_output(
    q: Tensor,
    k: Tensor,
    delta: Tensor,
    h: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_size: int = 64,
) -> Tensor:
    """O = scale (diag(gamma) Q S + (Q K^T * Gamma) E) of every chunk. -> [B,T,HV,V]   (5.5)

    q, k: [B,T,H,K]; delta: [B,T,HV,V] and h: [B,NC,HV,K,V] from chunk_states; g: within-chunk cumulative log2 decays
    or None; scale: K^-1/2 if None.
    """
    check_stage(cu_seqlens, chunk_size, q=q, k=k, delta=delta, g=g)
    dtype, (T, HV) = h.dtype, delta.shape[1:3]
    slots = slots_of(T, chunk_size, cu_seqlens, chunk_indices, k.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = (_head_chunks(x.to(dtype), slots).repeat_interleave(HV // k.shape[2], 2) for x in (q, k))
    G = k.new_zeros(k.shape[:-1]) if g is None else _chunk_decay(g, slots)
    scores = (q @ k.mT) * decay_matrix(G, dtype)
    o = G.to(dtype).exp2()[..., None] * (q @ h) + scores @ _head_chunks(delta.to(dtype), slots)  # (5.5)
    return _tokens(o * scale, slots, T)


def _width(name: str, A) -> int:
    check_tensor(name, A, FLOATS, dict.fromkeys(STAGE_AXES["A"]))
    return A.shape[-1]


def _head_chunks(x: Tensor, slots: Slots) -> Tensor:
    return to_chunks(x, slots).transpose(2, 3)  # [B, T, HV, ...] -> [B, NC, HV, C, ...]


def _tokens(x: Tensor, slots: Slots, T: int) -> Tensor:
    return to_tokens(x.transpose(2, 3), slots, T)  # [B, NC, HV, C, ...] -> [B, T, HV, ...]


def _chunk_decay(g: Tensor, slots: Slots) -> Tensor:
    # Missing tokens repeat the last real one, so that the last column is the whole decay of a short chunk too.
    return g[:, slots.token].transpose(2, 3).double()  # [B, NC, HV, C]
