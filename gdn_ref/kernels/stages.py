"""The forward pass stage by stage, one kernel and one host function each.

    chunk_local_cumsum -> chunk_scaled_dot_kkt_fwd -> solve_tril -> recompute_w_u_fwd -> chunk_states -> chunk_output

Names, arguments and meaning are those of gdn_ref/chunkwise.py; intermediate results pass through memory, which the
fused forward spares itself. A program works on one value head and one chunk (chunk_states: one sequence). Value head
h reads key head h // (HV // H).

Letters: BT tokens in a chunk, the book's C; BK and BV, the width of a tile along K and V. i_ is an index, b_ a tile
that lies in registers. Products take their operands in the dtype of the tokens they come from, float32 in full
precision, and add up in float32; decays, inverse and state are float32. Tokens that belong to no sequence give 0.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import check_stage, check_tensor
from ..chunks import prepare_chunk_indices
from .tiles import (
    LOG2E,
    WIDENED,
    decay_matrix,
    invert_unit_lower,
    load_rows,
    load_tokens,
    log2_decay,
    power,
    split_decay,
    store_rows,
)

CHUNK_SIZES = (16, 32, 64)  # powers of two, as tiles have them; beyond 64 the inverse no longer fits in registers
WIDEST_HEAD = 256


# ------------------------------------------------------------------------------------------ which tokens a chunk holds


@triton.jit
def chunk_of(i_c, T, cu_seqlens, chunk_indices, BT: tl.constexpr, IS_VARLEN: tl.constexpr):
    """First token of chunk i_c, counted over the whole batch in 64 bits, and how many tokens the chunk holds."""
    if IS_VARLEN:
        i_n = tl.load(chunk_indices + 2 * i_c)
        i_t = tl.load(chunk_indices + 2 * i_c + 1)
        start = tl.load(cu_seqlens + i_n).to(tl.int64)
        end = tl.load(cu_seqlens + i_n + 1).to(tl.int64)
    else:
        i_t = i_c % tl.cdiv(T, BT)
        start = (i_c // tl.cdiv(T, BT)).to(tl.int64) * T
        end = start + T
    first = start + i_t * BT
    return first, tl.minimum(end - first, BT).to(tl.int32)


@triton.jit
def load_decay(g, stride, rows, n, USE_G: tl.constexpr):
    """Cumulative log2 decays of a chunk's tokens, split in two; without a gate 0.

    Missing tokens repeat the last real one, so that nothing decays across them.
    """
    G = tl.zeros_like(rows).to(tl.float64)
    if USE_G:
        G = tl.load(g + tl.minimum(rows, n - 1) * stride).to(tl.float64)
    return split_decay(G)


@triton.jit
def last(x, BT: tl.constexpr):
    """The last number of a tile [BT]."""
    return tl.sum(tl.where(tl.arange(0, BT) == BT - 1, x, 0.0), 0)


# ------------------------------------------------------------------------------------------ kernels


@triton.jit
def chunk_local_cumsum_kernel(
    g, out, cu_seqlens, chunk_indices, T,
    HV: tl.constexpr, BT: tl.constexpr, SCALE: tl.constexpr, REVERSE: tl.constexpr, IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """Cumulative log2 decays of one chunk and head, times SCALE. Programs: (chunks, HV)."""
    i_h = tl.program_id(1)
    first, n = chunk_of(tl.program_id(0), T, cu_seqlens, chunk_indices, BT, IS_VARLEN)
    rows = tl.arange(0, BT)

    b_g = load_tokens(g + first * HV + i_h, HV, rows, n)  # [C]

    b_G = tl.cumsum(log2_decay(b_g), 0, reverse=REVERSE)  # (7.2)

    tl.store(out + first * HV + i_h + rows * HV, (b_G * SCALE).to(out.dtype.element_ty), mask=rows < n)


@triton.jit
def chunk_scaled_dot_kkt_fwd_kernel(
    k, g, beta, A, cu_seqlens, chunk_indices, T,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    USE_G: tl.constexpr, IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """diag(beta) (Gamma * K K^T) below the diagonal, for one chunk and head. Programs: (chunks, HV)."""
    i_h = tl.program_id(1)
    first, n = chunk_of(tl.program_id(0), T, cu_seqlens, chunk_indices, BT, IS_VARLEN)
    rows, columns = tl.arange(0, BT), tl.arange(0, BK)
    k += (first * H + i_h // (HV // H)) * K

    b_beta = load_tokens(beta + first * HV + i_h, HV, rows, n).to(tl.float32)  # [C]
    b_whole, b_rest = load_decay(g + first * HV + i_h if USE_G else g, HV, rows, n, USE_G)  # [C] each

    b_kk = tl.zeros([BT, BT], tl.float32)
    for i_k in range(0, K, BK):
        b_k = load_rows(k, H * K, rows, i_k + columns, n, K)  # [C, BK]
        b_kk += tl.dot(b_k, tl.trans(b_k), input_precision="ieee")
    b_L = b_beta[:, None] * decay_matrix(b_whole, b_rest, BT) * b_kk  # (5.2)
    b_L = tl.where(rows[:, None] > rows[None, :], b_L, 0.0)

    store_rows(A + (first * HV + i_h) * BT, HV * BT, rows, rows, n, BT, b_L)


@triton.jit
def solve_tril_kernel(
    A, X, cu_seqlens, chunk_indices, T,
    HV: tl.constexpr, BT: tl.constexpr, DT: tl.constexpr, IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """X = (I + A)^-1 of one chunk and head; DT, the dtype of the operands. Programs: (chunks, HV)."""
    i_h = tl.program_id(1)
    first, n = chunk_of(tl.program_id(0), T, cu_seqlens, chunk_indices, BT, IS_VARLEN)
    rows = tl.arange(0, BT)

    b_A = load_rows(A + (first * HV + i_h) * BT, HV * BT, rows, rows, n, n)  # [C, C]

    b_X = invert_unit_lower(b_A, BT, DT)  # (6.8)

    store_rows(X + (first * HV + i_h) * BT, HV * BT, rows, rows, n, BT, b_X)


@triton.jit
def recompute_w_u_fwd_kernel(
    k, v, beta, w, u, A, g, cu_seqlens, chunk_indices, T,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, USE_G: tl.constexpr, IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """W = A diag(beta) diag(gamma) K and U = A diag(beta) V of one chunk and head. Programs: (chunks, HV)."""
    i_h = tl.program_id(1)
    first, n = chunk_of(tl.program_id(0), T, cu_seqlens, chunk_indices, BT, IS_VARLEN)
    rows, keys, values = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    k += (first * H + i_h // (HV // H)) * K
    v, u, w = v + (first * HV + i_h) * V, u + (first * HV + i_h) * V, w + (first * HV + i_h) * K

    b_A = load_rows(A + (first * HV + i_h) * BT, HV * BT, rows, rows, n, n)  # [C, C]
    b_beta = load_tokens(beta + first * HV + i_h, HV, rows, n).to(tl.float32)  # [C]
    b_whole, b_rest = load_decay(g + first * HV + i_h if USE_G else g, HV, rows, n, USE_G)  # [C] each

    b_scale = b_beta * power(b_whole, b_rest)
    for i_k in range(0, K, BK):
        b_k = load_rows(k, H * K, rows, i_k + keys, n, K)  # [C, BK]
        b_k = (b_k * b_scale[:, None]).to(b_k.dtype)
        b_w = tl.dot(b_A.to(b_k.dtype), b_k, input_precision="ieee")  # (5.3)
        store_rows(w, HV * K, rows, i_k + keys, n, K, b_w)

    for i_v in range(0, V, BV):
        b_v = load_rows(v, HV * V, rows, i_v + values, n, V)  # [C, BV]
        b_v = (b_v * b_beta[:, None]).to(b_v.dtype)
        b_u = tl.dot(b_A.to(b_v.dtype), b_v, input_precision="ieee")  # (5.3)
        store_rows(u, HV * V, rows, i_v + values, n, V, b_u)


@triton.jit
def chunk_states_kernel(
    k, w, u, g, h, delta, initial_state, final_state, cu_seqlens, chunk_offsets, T,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    USE_G: tl.constexpr, USE_INITIAL_STATE: tl.constexpr, IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """E = U - W S, then S <- gamma_C S + (diag(gamma_C / gamma) K)^T E, chunk after chunk of one sequence and head.

    A program holds BV columns of S, which never meet the others, over the whole of K (BK >= K).
    Programs: (sequences, HV, V / BV).
    """
    i_n, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, end, i_c = i_n * T, i_n * T + T, i_n * tl.cdiv(T, BT)
    if IS_VARLEN:
        first, end = tl.load(cu_seqlens + i_n).to(tl.int64), tl.load(cu_seqlens + i_n + 1).to(tl.int64)
        i_c = tl.load(chunk_offsets + i_n)
    rows, keys, values = tl.arange(0, BT), tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    state = (i_n * HV + i_h) * K * V

    b_S = tl.zeros([BK, BV], tl.float32)
    if USE_INITIAL_STATE:
        b_S += load_rows(initial_state + state, V, keys, values, K, V).to(tl.float32)  # [K, BV]

    t = first
    while t < end:  # not range: the interpreter takes no bound that is data
        n = tl.minimum(end - t, BT).to(tl.int32)
        b_k = load_rows(k + (t * H + i_h // (HV // H)) * K, H * K, rows, keys, n, K)  # [C, K]
        b_w = load_rows(w + (t * HV + i_h) * K, HV * K, rows, keys, n, K)  # [C, K]
        b_u = load_rows(u + (t * HV + i_h) * V, HV * V, rows, values, n, V)  # [C, BV]
        b_whole, b_rest = load_decay(g + t * HV + i_h if USE_G else g, HV, rows, n, USE_G)  # [C] each

        whole_C, rest_C = last(b_whole, BT), last(b_rest, BT)
        b_E = b_u.to(tl.float32) - tl.dot(b_w, b_S.to(b_w.dtype), input_precision="ieee")  # (5.4)
        b_late = (b_E * power(whole_C - b_whole, rest_C - b_rest)[:, None]).to(b_k.dtype)
        b_next = power(whole_C, rest_C) * b_S + tl.dot(tl.trans(b_k), b_late, input_precision="ieee")  # (5.6)

        store_rows(h + (i_c * HV + i_h) * K * V, V, keys, values, K, V, b_S)
        store_rows(delta + (t * HV + i_h) * V, HV * V, rows, values, n, V, b_E)
        b_S, t, i_c = b_next, t + BT, i_c + 1

    store_rows(final_state + state, V, keys, values, K, V, b_S)


@triton.jit
def chunk_output_kernel(
    q, k, delta, h, g, o, cu_seqlens, chunk_indices, T, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, USE_G: tl.constexpr, IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """O = scale (diag(gamma) Q S + (Gamma * Q K^T) E), BV columns of one chunk and head.

    Programs: (chunks, HV, V / BV).
    """
    i_c, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, n = chunk_of(tl.program_id(0), T, cu_seqlens, chunk_indices, BT, IS_VARLEN)
    rows, keys, values = tl.arange(0, BT), tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    row_of_heads = (first * H + i_h // (HV // H)) * K
    h += (i_c * HV + i_h) * K * V

    b_E = load_rows(delta + (first * HV + i_h) * V, HV * V, rows, values, n, V)  # [C, BV]
    b_whole, b_rest = load_decay(g + first * HV + i_h if USE_G else g, HV, rows, n, USE_G)  # [C] each

    b_qk, b_qS = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BV], tl.float32)
    for i_k in range(0, K, BK):
        b_q = load_rows(q + row_of_heads, H * K, rows, i_k + keys, n, K)  # [C, BK]
        b_k = load_rows(k + row_of_heads, H * K, rows, i_k + keys, n, K)  # [C, BK]
        b_S = load_rows(h, V, i_k + keys, values, K, V)  # [BK, BV]
        b_qk += tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        b_qS += tl.dot(b_q, b_S.to(b_q.dtype), input_precision="ieee")
    b_P = (b_qk * decay_matrix(b_whole, b_rest, BT)).to(q.dtype.element_ty)  # [C, C]
    b_o = power(b_whole, b_rest)[:, None] * b_qS + tl.dot(b_P, b_E.to(b_P.dtype), input_precision="ieee")  # (5.5)

    store_rows(o + (first * HV + i_h) * V, HV * V, rows, values, n, V, b_o * scale)


# ------------------------------------------------------------------------------------------ host functions


class Chunks(NamedTuple):
    """The chunks of a batch, for the kernels."""

    number: int
    cu_seqlens: Tensor | None  # [N + 1]
    indices: Tensor | None  # [NC, 2]
    packed: bool


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
    """Cumulative sum of g within each chunk, times scale. [B,T,HV] -> [B,T,HV], float32 unless output_dtype says else.

    g: log decays; with scale = log2(e) the result is in log2, as the later stages read it. Summed in float64, with
    decays that underflow in float32 as resets (7.5); output_dtype = torch.float64 keeps small decays beside large ones.
    """
    chunks = _check(chunk_size, cu_seqlens, chunk_indices, g=g)
    HV, factor = g.shape[2], (1.0 if scale is None else scale) / LOG2E.value
    out = _output(chunks, g.shape, output_dtype or torch.float32, g.device)
    args = (_ready(g), out, chunks.cu_seqlens, chunks.indices, g.shape[1])
    _launch(chunk_local_cumsum_kernel, (chunks.number, HV), *args, HV, chunk_size, factor, reverse, chunks.packed)
    return out


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
    the chunk's matrix a token. float32 unless output_dtype says else.
    """
    chunks = _check(chunk_size, cu_seqlens, chunk_indices, k=k, g=g, beta=beta)
    (_, T, H, K), HV = k.shape, beta.shape[2]
    A = _output(chunks, (*beta.shape, chunk_size), output_dtype or torch.float32, k.device)
    args = (*_ready(k, g, beta), A, chunks.cu_seqlens, chunks.indices, T)
    sizes = (H, HV, K, chunk_size, _tile(K, k.dtype), g is not None, chunks.packed)
    _launch(chunk_scaled_dot_kkt_fwd_kernel, (chunks.number, HV), *args, *sizes)
    return A


def solve_tril(
    A: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """(I + A)^-1 of every chunk's strictly lower block, [B,T,HV,C] -> [B,T,HV,C]   (6.4), (6.8).

    float32 unless output_dtype says else. A 16-bit A is inverted with 16-bit operands.
    """
    chunks = _check(_chunk_size(A), cu_seqlens, chunk_indices, A=A)
    T, HV, C = A.shape[1:]
    X = _output(chunks, A.shape, output_dtype or torch.float32, A.device)
    A = _ready(A)
    DT = tl.float32 if A.dtype == torch.float32 else tl.float16
    args = (A, X, chunks.cu_seqlens, chunks.indices, T)
    _launch(solve_tril_kernel, (chunks.number, HV), *args, HV, C, DT, chunks.packed)
    return X


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
    [NC,2], derived from cu_seqlens when omitted, which waits for the device. Returns (w [B,T,HV,K] in k's dtype, u
    like v).
    """
    chunks = _check(_chunk_size(A), cu_seqlens, chunk_indices, k=k, v=v, beta=beta, A=A, g=g)
    (_, T, H, K), (HV, V), C = k.shape, v.shape[2:], A.shape[-1]
    k_, v_, beta, A, g = _ready(k, v, beta, A, g)
    w = _output(chunks, (*beta.shape, K), k_.dtype, k.device)
    u = _output(chunks, v.shape, v_.dtype, k.device)
    args = (k_, v_, beta, w, u, A, g, chunks.cu_seqlens, chunks.indices, T)
    sizes = (H, HV, K, V, C, _tile(K, k_.dtype), _tile(V, v_.dtype), g is not None, chunks.packed)
    _launch(recompute_w_u_fwd_kernel, (chunks.number, HV), *args, *sizes)
    return WU(w.to(k.dtype), u.to(v.dtype))


class ChunkStates(NamedTuple):
    h: Tensor  # [B,NC,HV,K,V] the state at the start of every chunk, float32
    delta: Tensor  # [B,T,HV,V] E = U - W S, what each token writes, float32
    final_state: Tensor  # [N,HV,K,V] float32


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
    initial_state: [N,HV,K,V] or None, never written to.
    """
    chunks = _check(chunk_size, cu_seqlens, chunk_indices, k=k, w=w, u=u, g=g)
    (B, T, H, K), (HV, V) = k.shape, u.shape[2:]
    N = len(cu_seqlens) - 1 if chunks.packed else B
    state = {"N": N, "HV": HV, "K": K, "V": V}
    if initial_state is not None:
        check_tensor("initial_state", initial_state, KERNEL_FLOATS, state, device=k.device)
    h = k.new_empty(B, chunks.number // max(B, 1), HV, K, V, dtype=torch.float32)
    delta = _output(chunks, u.shape, torch.float32, u.device)
    final_state = k.new_empty(N, HV, K, V, dtype=torch.float32)
    args = (*_ready(k, w, u, g), h, delta, _ready(initial_state), final_state, chunks.cu_seqlens)
    BV = _state_columns(V, args[0].dtype)
    sizes = (H, HV, K, V, chunk_size, _state_rows(K, args[0].dtype), BV)
    given = (g is not None, initial_state is not None, chunks.packed)
    grid = (N, HV, triton.cdiv(V, BV))
    warps = _warps(args[0].dtype, K)
    _launch(chunk_states_kernel, grid, *args, _chunk_offsets(chunks, chunk_size), T, *sizes, *given, warps=warps)
    return ChunkStates(h, delta, final_state)


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
    """O = scale (diag(gamma) Q S + (Q K^T * Gamma) E) of every chunk. -> [B,T,HV,V] float32   (5.5)

    q, k: [B,T,H,K]; delta: [B,T,HV,V] and h: [B,NC,HV,K,V] from chunk_states; g: within-chunk cumulative log2 decays
    or None; scale: K^-1/2 if None.
    """
    chunks = _check(chunk_size, cu_seqlens, chunk_indices, q=q, k=k, delta=delta, g=g)
    (B, T, H, K), (HV, V) = k.shape, delta.shape[2:]
    NC = chunks.number // max(B, 1)
    check_tensor("h", h, KERNEL_FLOATS, {"B": B, "NC": NC, "HV": HV, "K": K, "V": V}, device=k.device)
    o = _output(chunks, delta.shape, torch.float32, q.device)
    scale = K**-0.5 if scale is None else scale
    args = (*_ready(q, k, delta, h, g), o, chunks.cu_seqlens, chunks.indices, T, scale)
    BV = _tile(V, args[0].dtype)
    sizes = (H, HV, K, V, chunk_size, _tile(K, args[0].dtype), BV, g is not None, chunks.packed)
    _launch(chunk_output_kernel, (chunks.number, HV, triton.cdiv(V, BV)), *args, *sizes)
    return o


# ------------------------------------------------------------------------------------------ what they share

KERNEL_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _check(
    chunk_size: int, cu_seqlens: Tensor | None, chunk_indices: Tensor | None, **tensors: Tensor | None
) -> Chunks:
    """Check the arguments of a stage, as the torch stages do, and what Triton asks for besides; its chunks."""
    check_stage(cu_seqlens, chunk_size, **tensors)
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size: found {chunk_size}, expected one of {', '.join(map(str, CHUNK_SIZES))}")
    tensors = {name: x for name, x in tensors.items() if x is not None}
    for name, x in tensors.items():
        if name != "g" and x.dtype == torch.float64:
            raise TypeError(f"{name}: found dtype torch.float64, expected at most float32; the torch stages take it")
        if x.dim() == 4 and not 1 <= x.shape[-1] <= WIDEST_HEAD:
            raise ValueError(f"{name}: found a last axis of {x.shape[-1]}, expected 1 to {WIDEST_HEAD}")
    B, T = next(iter(tensors.values())).shape[:2]
    if cu_seqlens is None:
        return Chunks(B * triton.cdiv(T, chunk_size), None, None, False)
    device = next(iter(tensors.values())).device
    if chunk_indices is None:
        chunk_indices = prepare_chunk_indices(cu_seqlens, chunk_size)
    return Chunks(len(chunk_indices), cu_seqlens.to(device), chunk_indices.to(device).contiguous(), True)


def _chunk_size(A: Tensor) -> int:
    check_tensor("A", A, KERNEL_FLOATS, dict.fromkeys(("B", "T", "HV", "chunk_size")))
    return A.shape[-1]


def _chunk_offsets(chunks: Chunks, chunk_size: int) -> Tensor | None:
    """Number of the first chunk of each sequence, [N]."""
    if not chunks.packed:
        return None
    numbers = (chunks.cu_seqlens.diff().long() + chunk_size - 1) // chunk_size
    return numbers.cumsum(0) - numbers


def _tile(width: int, dtype: torch.dtype) -> int:
    """Columns of a tile along K or V. In 16 bits always 64: of two operands whose rows are not of one width, and whose
    places in shared memory are the same one after the other, ptxas 12.8 (Triton 3.4 and 3.6, Hopper) may build the
    second descriptor from a register that nobody set."""
    return min(64, max(16, triton.next_power_of_2(width))) if dtype == torch.float32 else 64


def _state_rows(K: int, dtype: torch.dtype) -> int:
    """The whole of K, in whole tiles."""
    return max(_tile(K, dtype), triton.next_power_of_2(K))


def _state_columns(V: int, dtype: torch.dtype) -> int:
    """Columns of the state that a program holds over the whole of K: 8192 numbers at most, or 16384 by twice as many
    warps. float32, whose products are unrolled, compiles the faster the fewer they are."""
    return min(_tile(V, dtype), 16 if dtype == torch.float32 else 64)


def _ready(*tensors: Tensor | None):
    """The tensors in the dtypes that they are multiplied in, with rows that lie side by side."""
    ready = [x if x is None else x.to(WIDENED.get(x.dtype, x.dtype)).contiguous() for x in tensors]
    return ready if len(ready) > 1 else ready[0]


def _output(chunks: Chunks, shape, dtype: torch.dtype, device) -> Tensor:
    """Memory for a stage's result: zeros where tokens may belong to no sequence."""
    return (torch.zeros if chunks.packed else torch.empty)(shape, dtype=dtype, device=device)


def _launch(kernel, grid: tuple[int, ...], *args, warps: int | None = None) -> None:
    # num_stages = 1: these kernels are to be right and readable on every device, so no loop is pipelined.
    with torch.cuda.device(args[0].device) if args[0].is_cuda else contextlib.nullcontext():
        kernel[grid](*args, num_warps=warps or _warps(args[0].dtype), num_stages=1)


def _warps(dtype: torch.dtype, state: int = 0) -> int:
    """Warps for a kernel whose operands have this dtype, and that holds a state of so many keys: 8 for more than 128,
    and for float32, whose products are unrolled multiply-adds and compile for three times as long with 4."""
    return 8 if dtype == torch.float32 or state > 128 else 4
