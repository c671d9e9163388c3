"""Chunkwise form in torch: the stages of the forward pass one by one, and the pass that the op runs.

The stages take tokens as they arrive ([B,T,HV,...], packed or not) and read like the book:

    chunk_local_cumsum -> chunk_scaled_dot_kkt_fwd -> solve_tril -> recompute_w_u_fwd -> chunk_states -> chunk_output

The pass that the op runs takes the same steps for a group of chunks at a time, small enough that what lies between two
products stays in the cache: prepare_chunks all that needs no state, scan_chunks the rest, chunk by chunk. It writes
into memory that is used again from group to group; its gradient is in chunkwise_backward.py.

Book: chapters 3 to 7, and 9 for the errors as it calculates them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import FLOATS, STAGE_AXES, check_stage, check_tensor
from .chunks import (
    Batch,
    Slots,
    join_states,
    join_tokens,
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
GROUP_ROWS = 32
# Places (tokens times heads) that one step of the scan may hold, so that memory stays bounded for large batches.
STEP_PLACES = 2**17


# ----------------------------------------------------------------------------------------------- equations on chunks


def cumulative_decay(g: Tensor) -> Tensor:
    """G_i = log2(e) (g_1 + ... + g_i) in float64 (7.2). [..., C] -> [..., C].

    Only differences of G are used, and beside a large decay the small ones would vanish from a float32 sum; so the sum
    is kept in float64, and a decay that underflows counts as the reset that it is (7.5).
    """
    return g.clamp(min=SMALLEST_LOG_DECAY[g.dtype]).double().cumsum(-1) * LOG2E  # (7.2)


def decay_matrix(G: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Gamma_ij = 2^(G_i - G_j) at and below the diagonal, else 0. [..., C] float64 -> [..., C, C]   (7.1)

    Every G is split into a whole number, whose differences float32 holds exactly, and a rest below 1, whose power is a
    factor of the row or the column: so the relative error stays near 1e-7 however far the decays reach. The exponent is
    masked before exp2, by index: a difference above the diagonal may overflow.
    """
    C, whole = G.shape[-1], G.round()
    rest, whole = (G - whole).to(dtype), whole.to(dtype)
    mask = torch.full((C, C), -math.inf, dtype=dtype, device=G.device).triu(1)
    exponent = torch.sub(whole[..., :, None], whole[..., None, :], out=out).add_(mask)
    return exponent.exp2_().mul_(rest.exp2()[..., :, None]).mul_((-rest).exp2()[..., None, :])  # (7.1)


class Decays(NamedTuple):
    Gamma: Tensor  # [..., C, C] decay between any two tokens of a chunk, 1 on the diagonal
    gamma: Tensor  # [..., C] since the chunk's start
    tail: Tensor  # [..., C] up to the chunk's end


def chunk_decays(g: Tensor, out: Tensor | None = None) -> Decays:
    """All three decays of a chunk from its g [..., C] (natural log); Gamma in the memory of out, if given."""
    G = cumulative_decay(g)
    return Decays(decay_matrix(G, g.dtype, out), G.exp2().to(g.dtype), (G[..., -1:] - G).exp2().to(g.dtype))


def unit_lower_inverse(L: Tensor, out: Tensor | None = None) -> Tensor:
    """(I + L)^-1 for L [M, C, C]; only what lies below the diagonal of L is read. Differentiable where out is None.

    Forward substitution (6.3). No power of L is ever formed: for repeated keys those reach 1e18 while the inverse stays
    near 1 (6.6), (6.7).
    """
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    # On the transpose, which is how LAPACK stores it: neither L nor the result is copied.
    out = None if out is None else out.mT
    return torch.linalg.solve_triangular(L.mT, eye, upper=True, unitriangular=True, out=out).mT  # (6.3)


# ----------------------------------------------------------------------------------------- the pass that the op runs


class Buffers:
    """Memory by name, used again from group to group: the cache holds it, and no fresh page has to be fetched."""

    def __init__(self, like: Tensor):
        self._like, self._held = like, {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Memory of that name in that shape, with whatever was left in it."""
        held, size = self._held.get(name), math.prod(shape)
        if held is None or held.numel() < size:
            held = self._held[name] = self._like.new_empty(size)
        return held.view(-1)[:size].view(shape)

    def lend(self, **memory: Tensor) -> None:
        """Memory of the caller's own, for results that are to stay."""
        self._held.update(memory)

    def copy(self, name: str, x: Tensor) -> Tensor:
        """x in its own contiguous memory, in the dtype of the arithmetic."""
        return self(name, *x.shape).copy_(x)


class Kept(NamedTuple):
    """What the forward pass leaves for the backward pass; M = chunks * HV rows, m = chunks * H."""

    S: Tensor  # [M, K, V] the state before the chunk
    R: Tensor  # [M, C, V] the errors
    A: Tensor  # [M, C, C] A_r, the inverse
    Gamma: Tensor  # [M, C, C]
    QK: Tensor  # [m, C, C] Q K^T
    KK: Tensor  # [m, C, C] K K^T

    @staticmethod
    def empty(like: Tensor, k: Tensor, v: Tensor) -> Kept:
        """Memory for the chunks of k [NC,C,H,K] and v [NC,C,HV,V], in the dtype of like."""
        (NC, C, H, K), (HV, V) = k.shape, v.shape[2:]
        M, m = NC * HV, NC * H
        shapes = ((M, K, V), (M, C, V), (M, C, C), (M, C, C), (m, C, C), (m, C, C))
        return Kept(*(like.new_empty(shape) for shape in shapes))

    def of(self, chunks: slice, H: int, HV: int) -> Kept:
        """The part of some chunks."""
        heads = HV, HV, HV, HV, H, H
        return Kept(*(x[chunks.start * n : chunks.stop * n] for x, n in zip(self, heads, strict=True)))


class Prepared(NamedTuple):
    """What a group of chunks needs before its states are known; M = chunks * HV rows."""

    q: Tensor  # [M, C, K] diag(gamma) Q
    P: Tensor  # [M, C, C] (Gamma * (Q K^T)) diag(beta)
    k: Tensor  # [M, C, K] diag(beta gamma_C / gamma) K
    w: Tensor  # [M, C, K] A_r diag(gamma) K
    u: Tensor  # [M, C, V] A_r V; the scan turns it into the errors R
    gamma_C: Tensor  # [M, 1, 1] decay of the whole chunk


def prepare_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, buffer: Buffers) -> Prepared:
    """Everything that does not depend on the state, for all chunks of a group at once.

    q, k: [m,C,H,K]; v: [m,C,HV,V]; g (natural log), beta: [m,C,HV] in the dtype of the arithmetic. Products with keys
    are taken once a key head; its R = HV/H value heads share them. beta stands on the right of the inverse, so that
    the errors come out and not the deltas: the backward pass needs those (9.3).
    """
    (m, C, H, K), (HV, V) = k.shape, v.shape[2:]
    heads = m, H, HV // H, C
    g, beta = (x.transpose(1, 2).reshape(heads) for x in (g, beta))
    Gamma, gamma, tail = chunk_decays(g, buffer("Gamma", m * HV, C, C).view(*heads, C))
    q, keys = buffer.copy("q", q.transpose(1, 2)), k.transpose(1, 2)[:, :, None]  # [m, H, C, K], [m, H, 1, C, K]
    A, P = _intra_chunk(q, buffer.copy("k", k.permute(0, 2, 3, 1)), Gamma, beta, buffer)
    # Memory is used three times over: for keys as columns, as they read and, once W is known, as they write.
    reading = torch.mul(keys, gamma[..., None], out=buffer("k", *heads, K))
    w = torch.bmm(A, reading.flatten(0, 2), out=buffer("w", m * HV, C, K))  # (9.3)
    writing = torch.mul(keys, (beta * tail)[..., None], out=buffer("k", *heads, K))
    queries = torch.mul(q[:, :, None], gamma[..., None], out=buffer("q" if HV == H else "queries", *heads, K))
    values = buffer.copy("v", v.transpose(1, 2)).flatten(0, 1)
    u = torch.bmm(A, values, out=buffer("R", m * HV, C, V))  # (9.3)
    return Prepared(queries.flatten(0, 2), P, writing.flatten(0, 2), w, u, gamma[..., -1].reshape(-1, 1, 1))


def _intra_chunk(q: Tensor, kT: Tensor, Gamma: Tensor, beta: Tensor, buffer: Buffers) -> tuple[Tensor, Tensor]:
    """A_r and (Gamma * (Q K^T)) diag(beta), both [M,C,C]; q [m,H,C,K], kT [m,H,K,C], Gamma [m,H,R,C,C]."""
    m, H, _, C = kT.shape
    q, kT = q.flatten(0, 1), kT.flatten(0, 1)
    # Keys as columns, since a product with a transposed right factor is half as fast.
    QK, KK = (torch.bmm(x, kT, out=buffer(n, m * H, C, C)) for x, n in ((q, "QK"), (kT.mT, "KK")))
    weights = torch.mul(Gamma, beta[..., None, :], out=buffer("P", *Gamma.shape))
    L = torch.mul(weights, KK.view(m, H, 1, C, C), out=buffer("L", *Gamma.shape)).view(-1, C, C)
    A = unit_lower_inverse(L, buffer("A", *L.shape))  # (9.3)
    return A, weights.mul_(QK.view(m, H, 1, C, C)).view(-1, C, C)  # (5.5)


def scan_chunks(chunks: Prepared, state: Tensor, buffer: Buffers) -> Tensor:
    """Carry the state [n*HV,K,V] of n sequences through a group of chunks, step by step; returns it after them.

    Leaves the state before every chunk in buffer "S" and turns chunks.u into the errors.
    """
    steps = len(chunks.u) // len(state), len(state)
    starts = buffer("S", *steps, *state.shape[1:]).unbind()
    ahead = *starts[1:], buffer("state", *state.shape)
    starts[0].copy_(state)
    parts = (x.unflatten(0, steps).unbind() for x in (chunks.k.mT, chunks.w, chunks.u, chunks.gamma_C))
    for S, after, kT, w, u, gamma_C in zip(starts, ahead, *parts, strict=True):
        u.baddbmm_(w, S, alpha=-1)  # R = A_r (V - diag(gamma) K S)   (9.3)
        torch.mul(gamma_C, S, out=after).baddbmm_(kT, u)  # (5.6)
    return ahead[-1]


class Group(NamedTuple):
    """Chunks that are calculated together: some steps of the scan, through which the same sequences go."""

    chunks: slice  # of [NC, ...]
    sequences: int


def groups_of(counts: list[int], HV: int) -> list[Group]:
    """Cut the steps of a scan into groups of about GROUP_ROWS rows; counts: sequences at each step."""
    groups, start, stop = [], 0, 0
    for n, count in enumerate(counts):
        stop += count
        if n + 1 == len(counts) or counts[n + 1] != count or (stop + count - start) * HV > GROUP_ROWS:
            groups.append(Group(slice(start, stop), count))
            start = stop
    return groups


def _run_batch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, counts: list[int], scale: float, keep: bool
) -> tuple[Tensor, Tensor, Kept | None]:
    """Chunks [NC,C,...] in the order of the scan and states [n,HV,K,V] -> outputs [NC,C,HV,V] and states."""
    (C, HV, V), (H, K) = v.shape[1:], k.shape[2:]
    kept = Kept.empty(state, k, v) if keep else None
    buffer, o, final = Buffers(state), state.new_empty(v.shape), torch.empty_like(state).flatten(0, 1)
    state = state.flatten(0, 1)
    for here, n in groups_of(counts, HV):
        if keep:
            buffer.lend(**kept.of(here, H, HV)._asdict())
        final[n * HV : len(state)] = state[n * HV :]  # of the sequences that have ended
        chunks = prepare_chunks(*(x[here] for x in (q, k, v, g, beta)), buffer)
        state = scan_chunks(chunks, state[: n * HV], buffer)
        found = torch.bmm(chunks.q, buffer("S", len(chunks.q), K, V), out=buffer("v", *chunks.u.shape))
        found.baddbmm_(chunks.P, chunks.u)  # (5.5)
        torch.mul(found.view(-1, HV, C, V).transpose(1, 2), scale, out=o[here])
    final[: len(state)] = state
    return o, final.view(-1, HV, K, V), kept


class Forward(NamedTuple):
    o: Tensor  # [B,T,HV,V]
    state: Tensor  # [N,HV,K,V]
    batches: list[Batch]
    kept: list[Kept]  # one a batch, where they were wanted


def chunkwise_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    keep: bool = False,
) -> Forward:
    """The whole forward pass, by chunks; the same meaning and arguments as recurrent_gated_delta_rule.

    q, k: [B,T,H,K]; v: [B,T,HV,V], any floating dtype; g (natural log), beta: [B,T,HV] and initial_state [N,HV,K,V]
    in the dtype of the arithmetic; cu_seqlens: [N+1] for packed input (B = 1). keep: leave what the backward pass
    needs. Returns o [B,T,HV,V] in that dtype and the states [N,HV,K,V]. Nothing is recorded for autograd: see
    chunkwise_backward.py. Arguments are not checked here: see ops.py. Source: Gated Delta Networks (arXiv 2412.06464)
    section 3.3, with Gamma for the mask of its output; book (5.3) to (5.6), (9.3).
    """
    # Chunks much longer than keys are wide cost more, and round worse: so many writes into so few directions all but
    # cancel in I - K^T W. Beyond 64 tokens the same is true of any width.
    chunk_size = min(chunk_size, LARGEST_CHUNK, max(16, power_of_two(2 * k.shape[-1])))
    (B, T, HV, _), tokens = v.shape, (q, k, v, g, beta)
    batches = scan_batches(B, T, cu_seqlens, chunk_size, max(1, STEP_PLACES // HV))
    if not batches:
        return Forward(initial_state.new_zeros(v.shape), initial_state.clone(), [], [])
    runs = []
    for batch in batches:
        chunks = (batch.chunks(x, masked=x is g or x is beta) for x in tokens)
        runs.append(_run_batch(*chunks, batch.states(initial_state), batch.counts, scale, keep))
    outputs, states, kept = zip(*runs, strict=True)
    return Forward(join_tokens(outputs, batches, B, T), join_states(states, batches, initial_state), batches, kept)


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
    inverse = unit_lower_inverse(blocks.reshape(-1, C, C)).view(blocks.shape)
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
