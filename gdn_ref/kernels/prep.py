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
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, A, P, factors, o,
    T, N, slots, scale, q_stride, k_stride, g_stride, beta_stride,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, NORM: tl.constexpr, HAS_G: tl.constexpr, RAW_G: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_BETA: tl.constexpr, RAW_BETA: tl.constexpr, LARGEST_BETA: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head.

    q, k: token rows [.., H, K], `stride` elements from token to token; g, beta: [.., HV]; A_log, dt_bias: [HV].
    Writes A [HV, slots, C, C] = (I + N)^-1 with N = tril(Gamma * (K K^T), -1) diag(beta), P of that shape = scale
    (Gamma * (Q K^T)) diag(beta), and factors [HV, slots, 4, C]: with what a key's row, an error's row and a query's row
    is multiplied in the scan, and the decay over the whole chunk. beta stands on the right in both, so that the rows
    of the scan are the errors themselves. The L2 norm is such a factor too: q and k stay as they came.
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

    # compute, and store what is done with: P before the inverse, so that its registers are free there
    base = h.to(tl.int64) * slots + slot
    p_tile = base * (C * C) + i[:, None] * C + i[None, :]
    p_factors = factors + base * (4 * C) + i
    whole, rest = cumulative_decay(b_g)  # (7.2)
    whole_C, rest_C = tl.sum(tl.where(i == C - 1, whole, 0.0), 0), tl.sum(tl.where(i == C - 1, rest, 0.0), 0)
    gamma = power(whole, rest)
    tail = power(whole_C - whole, rest_C - rest)
    length_k, length_q = 1.0, 1.0
    if NORM:
        length_k, length_q = inverse_lengths(b_k), inverse_lengths(b_q)
    b_beta *= length_k
    tl.store(p_factors, gamma * length_k)  # of K in diag(gamma) K S   (5.3)
    tl.store(p_factors + C, tail * b_beta)  # of E in (diag(gamma_C/gamma) K)^T E   (5.6)
    tl.store(p_factors + 2 * C, gamma * (length_q * scale))  # of Q in diag(gamma) Q S   (5.5)
    tl.store(p_factors + 3 * C, power(whole_C, rest_C), mask=i == 0)  # of S   (5.6)

    exponent = (whole[:, None] - whole[None, :]) + (rest[:, None] - rest[None, :])
    Gamma = tl.exp2(tl.where(i[:, None] >= i[None, :], exponent, float("-inf"))) * b_beta[None, :]  # (7.1)
    b_P = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * Gamma * scale  # (5.5)
    b_N = tl.dot(b_k, tl.trans(b_k), input_precision="ieee") * Gamma  # (5.2)
    if NORM:
        b_P *= length_q[:, None]
        b_N *= length_k[:, None]
    tl.store(P + p_tile, b_P.to(P.dtype.element_ty))
    b_A = invert_unit_lower(b_N.to(INVERSE), C, INVERSE)  # (5.2)
    tl.store(A + p_tile, b_A.to(A.dtype.element_ty))
