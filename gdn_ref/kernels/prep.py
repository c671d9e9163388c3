"""Fused forward, first part: everything in a chunk that does not depend on the state, all chunks at once.

The state enters a chunk only through what keys and queries read of it. So the triangle of decays, the inverse and the
scores are made here, in parallel over chunks and heads, and scan.py carries the state through them.

Two kernels. A cumulative sum is a chain of short steps in which a whole program waits for 64 numbers; done for 16
heads at once by a kernel of its own it costs next to nothing, and the other finds the sums where it wants them.
"""

import triton
import triton.language as tl

from .gates import L2_EPS, log_decay, write_strength
from .tiles import RELEASE, first_slot, invert_unit_lower, load_rows, locate, log2_decay, power, split_decay

# What is kept of a chunk besides A and P, one row of C numbers each; scan.py reads the first five.
READ = tl.constexpr(0)  # multiplies K in diag(gamma) K S
WRITE = tl.constexpr(1)  # multiplies E in (diag(gamma_C / gamma) K)^T E
QUERY = tl.constexpr(2)  # multiplies Q in diag(gamma) Q S
SCORE = tl.constexpr(3)  # multiplies P
END = tl.constexpr(4)  # its first number is the decay over the chunk, its second the log2 bound of what it lets through
WHOLE, REST, BETA = tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)  # G in two parts, beta
FACTORS = tl.constexpr(8)
# Whether four rows come in one load and are taken apart: Triton 3.4 and 3.9 find fewer registers for it, and spill.
ONE_LOAD = tl.constexpr((3, 6) <= RELEASE < (3, 9))


@triton.jit
def load_factors(p_rows, C: tl.constexpr):
    """Four neighbouring rows of a chunk's factors, [C] each: from the first on READ, WRITE, QUERY, SCORE.

    In one load: what has fewer numbers than a program has threads the compiler copies in the layout of the product that
    it meets, all of it to every warp, which in the scan were 33 copies a thread and chunk.
    """
    if ONE_LOAD:
        rows = tl.reshape(tl.load(p_rows + tl.arange(0, 4 * C)), [2, 2, C])
        first, second = tl.split(tl.trans(rows, 2, 1, 0))
        row_0, row_1 = tl.split(first)
        row_2, row_3 = tl.split(second)
    else:
        i = tl.arange(0, C)
        row_0, row_1 = tl.load(p_rows + i), tl.load(p_rows + C + i)
        row_2, row_3 = tl.load(p_rows + 2 * C + i), tl.load(p_rows + 3 * C + i)
    return row_0, row_1, row_2, row_3


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


@triton.jit
def as_operand(x, y, SIZED: tl.constexpr = True):
    """x [M, N] in the dtype of y, which it meets in a product, and what is left to multiply its rows by: if SIZED their
    sizes [M, 1], where that dtype is float16, which holds no numbers of any size; else 1."""
    size = 1.0
    if SIZED and y.dtype == tl.float16:
        x, top = unscaled(x)
        size = top[:, None]
    return x.to(y.dtype), size


@triton.jit
def chunk_of_slot(cu_seqlens, slot, T, N, C: tl.constexpr, PACKED: tl.constexpr):
    """(first token of the chunk in a slot, tokens from there to the end of its sequence: none in an empty slot)."""
    if PACKED:
        n, chunk, start, end = locate(cu_seqlens, slot, N, C)
    else:
        chunk = slot % tl.cdiv(T, C)
        start = (slot // tl.cdiv(T, C)).to(tl.int64) * T
        end = start + T
    token = start + chunk * C
    return token, (end - token).to(tl.int32)


@triton.jit(do_not_specialize=["T", "N", "slots"])  # or a new number of tokens would compile anew
def decay_kernel(
    g, beta, A_log, dt_bias, cu_seqlens, factors, T, N, slots, g_stride, beta_stride,
    HV: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, PACKED: tl.constexpr, HAS_G: tl.constexpr,
    RAW_G: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_BETA: tl.constexpr, RAW_BETA: tl.constexpr,
    LARGEST_BETA: tl.constexpr,
):  # fmt: skip
    """The gates of one chunk, BH heads at once: cumulative log2 decays and beta.

    g, beta: [.., HV], `stride` elements from token to token; A_log, dt_bias: [HV]. Writes rows WHOLE, REST and BETA
    of factors [HV, slots, FACTORS, C]; past the end of a sequence nothing decays and beta is 0.
    """
    NH: tl.constexpr = (HV + BH - 1) // BH
    slot = tl.program_id(0) // NH
    h = tl.program_id(0) % NH * BH + tl.arange(0, BH)
    i = tl.arange(0, C)
    token, left = chunk_of_slot(cu_seqlens, slot, T, N, C, PACKED)
    if left <= 0:
        return

    # load
    inside = (i < left)[:, None] & (h < HV)[None, :]
    b_g = tl.zeros([C, BH], tl.float32)
    b_beta = tl.where(inside, 1.0, 0.0)
    if HAS_G:
        b_g = load_rows(g + token * g_stride, g_stride, i, h, left, HV).to(tl.float32)
    if RAW_G:
        rate, bias = tl.load(A_log + h, mask=h < HV, other=0.0).to(tl.float32), tl.zeros([BH], tl.float32)
        if HAS_BIAS:
            bias = tl.load(dt_bias + h, mask=h < HV, other=0.0).to(tl.float32)
        b_g = tl.where(inside, log_decay(b_g, rate[None, :], bias[None, :]), 0.0)
    if HAS_BETA:
        b_beta = load_rows(beta + token * beta_stride, beta_stride, i, h, left, HV).to(tl.float32)
    if RAW_BETA:
        b_beta = tl.where(inside, LARGEST_BETA * write_strength(b_beta), 0.0)  # (7.6)

    # compute
    whole, rest = split_decay(tl.cumsum(log2_decay(b_g), 0))  # (7.2)

    # store
    place = factors + (h.to(tl.int64)[None, :] * slots + slot) * (FACTORS * C) + i[:, None]
    there = (h < HV)[None, :] & (i < C)[:, None]
    tl.store(place + WHOLE * C, whole, mask=there)
    tl.store(place + REST * C, rest, mask=there)
    tl.store(place + BETA * C, b_beta, mask=there)


@triton.jit
def no_output(o, cu_seqlens, slot, h, T, N, HV: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr):
    """0 for tokens that belong to no sequence: their slots begin where the last sequence's end."""
    i, columns = tl.arange(0, C), tl.arange(0, BV)
    token, stop = (slot - N).to(tl.int64) * C, tl.load(cu_seqlens + N).to(tl.int64)
    inside = ((token + i >= stop) & (token + i < T))[:, None] & (columns < V)[None, :]
    p_o = o + (token * HV + h) * V + i[:, None] * (HV * V) + columns[None, :]
    tl.store(p_o, tl.zeros([C, BV], o.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T", "N", "slots"])
def prepare_kernel(
    q, k, cu_seqlens, tiles, factors, o, T, N, slots, scale, q_stride, k_stride,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, NORM: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head.

    q, k: token rows [.., H, K], `stride` elements from token to token. Writes tiles [2, HV, slots, C, C]: A = (I +
    N)^-1 with N = tril(Gamma * (K K^T), -1) diag(beta), and P = (Gamma * (Q K^T)) diag(beta) with rows of largest
    entry 1; and the first five rows of factors. beta stands on the right in both, so that the rows of the scan are the
    errors themselves. The L2 norm is a factor too: q and k stay as they came. BOUND asks for what segments need.
    """
    h = tl.program_id(0) % HV
    slot = tl.program_id(0) // HV
    if PACKED:
        if slot >= first_slot(cu_seqlens, N, C):
            no_output(o, cu_seqlens, slot, h, T, N, HV, V, C, BV)
            return
    token, left = chunk_of_slot(cu_seqlens, slot, T, N, C, PACKED)
    if left <= 0:
        return

    # load
    i, columns = tl.arange(0, C), tl.arange(0, BK)
    b_k = load_rows(k + token * k_stride + (h // (HV // H)) * K, k_stride, i, columns, left, K)
    b_q = load_rows(q + token * q_stride + (h // (HV // H)) * K, q_stride, i, columns, left, K)
    base = h.to(tl.int64) * slots + slot
    p_factors = factors + base * (FACTORS * C) + i
    whole, rest, b_beta = tl.load(p_factors + WHOLE * C), tl.load(p_factors + REST * C), tl.load(p_factors + BETA * C)
    last = factors + base * (FACTORS * C) + C - 1
    whole_C, rest_C = tl.load(last + WHOLE * C), tl.load(last + REST * C)

    # compute, and store what is done with: P first and K K^T after it, so that their registers are free again
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
    tl.store(p_factors + WRITE * C, late)  # (5.6)
    tl.store(p_factors + QUERY * C, gamma * score)  # (5.5)
    tl.store(p_factors + END * C, power(whole_C, rest_C), mask=i == 0)  # (5.6)
    tile = i[:, None] * C + i[None, :]
    p_P = tiles + ((h + HV).to(tl.int64) * slots + slot) * (C * C) + tile
    b_P, top = unscaled(tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * Gamma)  # (5.5)
    tl.store(p_factors + SCORE * C, top * score)
    tl.store(p_P, b_P.to(tiles.dtype.element_ty))

    b_KK = tl.dot(b_k, tl.trans(b_k), input_precision="ieee")
    if NORM:
        gamma *= length_k
    tl.store(p_factors + READ * C, gamma)  # (5.3)
    if BOUND:
        size = b_beta  # beta |k|^2, or no less: |k| <= 1 where it is normalised
        if not NORM:
            size *= tl.sum(tl.where(i[:, None] == i[None, :], b_KK, 0.0), 1)
        # Of H_t, whose eigenvalues are 1 and 1 - size. One number, no scalar: a sum from one dimension to none of what
        # comes of a product Triton 3.6 does not compile for Blackwell.
        growth = tl.sum(tl.log2(tl.maximum(size - 1, 1.0))[:, None], 0)  # (2.2)
        tl.store(factors + base * (FACTORS * C) + END * C + tl.arange(1, 2), whole_C + rest_C + growth)
    b_N = b_KK * Gamma  # (5.2)
    if NORM:
        b_N *= length_k[:, None]
    FINE: tl.constexpr = tl.float32 if tiles.dtype.element_ty == tl.float32 else tl.float16
    b_A = invert_unit_lower(b_N.to(FINE), C, FINE)  # (5.2)
    tl.store(tiles + base * (C * C) + tile, b_A.to(tiles.dtype.element_ty))
