"""Fused forward, first of two kernels: everything in a chunk that does not depend on the state, all chunks at once.

The state enters a chunk only through what keys and queries read of it. So the triangle of decays, the inverse and the
scores are made here, in parallel over chunks and heads, and scan.py carries the state through them.
"""

import triton
import triton.language as tl

from .gates import L2_EPS, log_decay, write_strength
from .tiles import cumulative_decay, first_slot, invert_unit_lower, load_rows, locate, power


@triton.jit
def inverse_lengths(x):
    """1 / |x| of every row of a tile [C, K], with the epsilon inside the root (2.5)."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + L2_EPS)  # (2.5)


@triton.jit
def unscaled(x):
    """Rows of x [M, N] brought to a largest entry of 1, and what was taken out of them: ([M, N], [M]).

    So that float16 holds them, whatever their size, eight times as finely as bfloat16 would.
    """
    top = tl.max(tl.abs(x), 1)
    top = tl.where(top > 1e-30, top, 1.0)
    return x * (1 / top)[:, None], top


@triton.jit(do_not_specialize=["T", "N", "slots"])  # or a new number of tokens would compile anew
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, tiles, factors, o,
    T, N, slots, scale, q_stride, k_stride, g_stride, beta_stride,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, NORM: tl.constexpr, HAS_G: tl.constexpr, RAW_G: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_BETA: tl.constexpr, RAW_BETA: tl.constexpr, LARGEST_BETA: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head.

    q, k: token rows [.., H, K], `stride` elements from token to token; g, beta: [.., HV]; A_log, dt_bias: [HV].
    Writes tiles [HV, slots, 2, C, C]: A = (I + N)^-1 with N = tril(Gamma * (K K^T), -1) diag(beta), and P = (Gamma *
    (Q K^T)) diag(beta) with rows of largest entry 1; and factors [HV, slots, 5, C] for the scan: what keys, errors,
    queries and P are multiplied with there, and the decay over the whole chunk. beta stands on the right in both, so
    that the rows of the scan are the errors themselves. The L2 norm is a factor too: q and k stay as they came.
    """
    h = tl.program_id(0) % HV
    slot = tl.program_id(0) // HV
    i = tl.arange(0, C)
    if PACKED:
        n, chunk, start, end = locate(cu_seqlens, slot, N, C)
        if slot >= first_slot(cu_seqlens, N, C):  # tokens of no sequence: their slots begin where the last one's end
            token, stop = (slot - N).to(tl.int64) * C, tl.load(cu_seqlens + N).to(tl.int64)
            columns = tl.arange(0, BV)
            inside = ((token + i >= stop) & (token + i < T))[:, None] & (columns < V)[None, :]
            p_o = o + (token * HV + h) * V + i[:, None] * (HV * V) + columns[None, :]
            tl.store(p_o, tl.zeros([C, BV], o.dtype.element_ty), mask=inside)
            return
    else:
        chunk = slot % tl.cdiv(T, C)
        start = (slot // tl.cdiv(T, C)).to(tl.int64) * T
        end = start + T
    token = start + chunk * C
    left = (end - token).to(tl.int32)  # tokens from here to the end of the sequence
    if left <= 0:
        return

    # load
    columns = tl.arange(0, BK)
    inside = i < left
    b_k = load_rows(k + token * k_stride + (h // (HV // H)) * K, k_stride, i, columns, left, K)
    b_q = load_rows(q + token * q_stride + (h // (HV // H)) * K, q_stride, i, columns, left, K)
    b_g = tl.zeros([C], tl.float32)
    b_beta = tl.where(inside, 1.0, 0.0)
    if HAS_G:
        b_g = tl.load(g + (token + i) * g_stride + h, mask=inside, other=0.0).to(tl.float32)
    if RAW_G:
        bias = 0.0
        if HAS_BIAS:
            bias = tl.load(dt_bias + h).to(tl.float32)
        b_g = tl.where(inside, log_decay(b_g, tl.load(A_log + h).to(tl.float32), bias), 0.0)
    if HAS_BETA:
        b_beta = tl.load(beta + (token + i) * beta_stride + h, mask=inside, other=0.0).to(tl.float32)
    if RAW_BETA:
        b_beta = tl.where(inside, LARGEST_BETA * write_strength(b_beta), 0.0)  # (7.6)

    # compute, and store what is done with: P first and K K^T after it, so that their registers are free again
    base = h.to(tl.int64) * slots + slot
    p_tile = tiles + base * (2 * C * C) + i[:, None] * C + i[None, :]
    p_factors = factors + base * (5 * C) + i
    whole, rest = cumulative_decay(b_g)  # (7.2)
    whole_C, rest_C = tl.sum(tl.where(i == C - 1, whole, 0.0), 0), tl.sum(tl.where(i == C - 1, rest, 0.0), 0)
    gamma = power(whole, rest)
    exponent = (whole[:, None] - whole[None, :]) + (rest[:, None] - rest[None, :])
    Gamma = tl.exp2(tl.where(i[:, None] >= i[None, :], exponent, float("-inf")))  # (7.1)
    late = power(whole_C - whole, rest_C - rest) * b_beta
    score = tl.full([C], scale, tl.float32)
    if NORM:
        length_k = inverse_lengths(b_k)
        score *= inverse_lengths(b_q)
        Gamma *= length_k[None, :]
        late *= length_k
    Gamma *= b_beta[None, :]
    tl.store(p_factors + C, late)  # of E in (diag(gamma_C/gamma) K)^T E   (5.6)
    tl.store(p_factors + 2 * C, gamma * score)  # of Q in diag(gamma) Q S   (5.5)
    tl.store(p_factors + 4 * C, power(whole_C, rest_C), mask=i == 0)  # of S   (5.6)
    b_P, top = unscaled(tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * Gamma)  # (5.5)
    tl.store(p_factors + 3 * C, top * score)
    tl.store(p_tile + C * C, b_P.to(tiles.dtype.element_ty))

    b_N = tl.dot(b_k, tl.trans(b_k), input_precision="ieee") * Gamma  # (5.2)
    if NORM:
        gamma *= length_k
        b_N *= length_k[:, None]
    tl.store(p_factors, gamma)  # of K in diag(gamma) K S   (5.3)
    b_A = invert_unit_lower(b_N.to(tiles.dtype.element_ty), C, tiles.dtype.element_ty)  # (5.2)
    tl.store(p_tile, b_A.to(tiles.dtype.element_ty))
