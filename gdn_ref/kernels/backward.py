"""Fused backward: states and errors once more, adjoints in reverse, and from both every gradient, chunk by chunk.

With the factors of prep.py, gamma_i = e^G_i, l_j = e^(G_C - G_j), keys and queries of length 1 where they are
normalised, S the state before a chunk, E its errors and dS' the adjoint of the state after it:

    states     S and E again, as in scan.py
    adjoints   dv = A^T (scale P^T do + beta l (K dS'));  dS = gamma_C dS' + scale Q^T (gamma do) - K^T (gamma dv)
    pairs      F = Gamma * (do E^T);  J = the same of dv, below the diagonal alone; and X, see below
    gradients  dq = scale (gamma (do S^T) + F (beta K))
               dk = beta c - gamma (dv S^T) - J (beta K)  with  c = l (E dS'^T) + scale F^T Q - J^T K
    finish     dbeta = k.c, and dg, which takes from all this only what lies across a token

A token's decay multiplies what is written before it and read at it or after. So dg_t sums over pairs j < t <= i, and
nothing else: X_ij = beta_j (scale q_i.k_j F_ij - k_i.k_j J_ij) inside the chunk; y_i = gamma_i (scale q_i.(do S^T)_i -
k_i.(dv S^T)_i) from the state before it, over i >= t; z_j = beta_j l_j k_j.(E dS'^T)_j to the state after it, over
j < t; gamma_C <S, dS'> past the chunk altogether   (9.13). The pairs of X are had as sums of its rows less sums of its
columns, from i and j = t on, which costs least and is what (9.17) warns of: the pairs after t cancel, and at a token
across which next to nothing passes only their rounding is left. So they are added up in float64, where that is 1e-15 of
them (of a token across which less than e^-30 of the rest passes dg has few digits), and without the diagonal: a query's
own key is across nothing, and outweighs all the rest where tokens decay fast. Without beta, columns of X are k.c but
for its part from after the chunk.

Nothing is added up across programs, and no sum depends on who comes first. The adjoints are in adjoints.py, all else
is here.
"""

import triton
import triton.language as tl

from .gates import log1p_exp, log_decay, write_strength
from .prep import (
    BETA,
    END,
    FACTORS,
    QUERY,
    READ,
    REST,
    WHOLE,
    WRITE,
    as_operand,
    chunk_of_slot,
    inverse_lengths,
    load_factors,
)
from .scan import read_tile, rows_of, write_tile
from .tiles import first_slot, load_rows, power, sequence, store_rows

# ------------------------------------------------------------------------------------------ what the kernels share


@triton.jit
def tokens_of_none(cu_seqlens, slot, T, N, C: tl.constexpr, PACKED: tl.constexpr):
    """Tokens of no sequence in a slot: the first token looked at, and which of the C from there on are such. Their
    slots begin where those of the last sequence end."""
    i = tl.arange(0, C)
    token = (slot - N).to(tl.int64) * C
    found = i < 0
    if PACKED:
        if slot >= first_slot(cu_seqlens, N, C):
            found = (token + i >= tl.load(cu_seqlens + N).to(tl.int64)) & (token + i < T)
    return token, found


# ------------------------------------------------------------------------------------------ states, in order


@triton.jit(do_not_specialize=["T", "slots"])
def states_kernel(
    k, v, tiles, factors, initial, S, E, cu_seqlens,
    T, slots, k_stride, v_stride, initial_n, initial_h, initial_v, initial_k,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, VP: tl.constexpr, PACKED: tl.constexpr, HAS_INITIAL: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The scan of scan.py without its outputs: what it passes through is kept instead.

    Writes S [HV, slots, VP, BK], the state before every chunk, transposed, and E [HV, slots, C, VP], its errors; V is
    filled up with zeros to VP.
    """
    NV: tl.constexpr = VP // BV
    iv = tl.program_id(0) % NV
    h = (tl.program_id(0) // NV) % HV
    n = tl.program_id(0) // NV // HV
    start, L, slot = sequence(cu_seqlens, n, T, C, PACKED)
    NT = tl.cdiv(L, C)
    base = h.to(tl.int64) * slots + slot
    width = V - iv * BV
    m_k = rows_of(k + start * k_stride + (h // (HV // H)) * K, k_stride, L, K, C, BK, TMA)
    m_v = rows_of(v + start * v_stride + h * V + iv * BV, v_stride, L, width, C, BV, TMA)
    m_A = rows_of(tiles + base * (C * C), C, NT * C, C, C, C, TMA)
    m_S = rows_of(S + (base * VP + iv * BV) * BK, BK, NT * VP, BK, BV, BK, TMA)
    m_E = rows_of(E + base * C * VP + iv * BV, VP, NT * C, BV, C, BV, TMA)
    row_v, row_k = iv * BV + tl.arange(0, BV), tl.arange(0, BK)
    b_S = tl.zeros([BV, BK], tl.float32)
    if HAS_INITIAL:
        p_initial = initial + n.to(tl.int64) * initial_n + h.to(tl.int64) * initial_h
        p_initial += row_v[:, None] * initial_v + row_k[None, :] * initial_k
        b_S = tl.load(p_initial, mask=(row_v < V)[:, None] & (row_k < K)[None, :], other=0.0).to(tl.float32)

    for chunk in tl.range(0, NT, num_stages=STAGES):
        # load; k and A feed products alone, v none: no tile of a pipelined loop does both (see gradients_kernel)
        row = chunk * C
        row_S = chunk * VP
        b_k = read_tile(m_k, row, k_stride, L, K, C, BK, TMA)
        b_A = read_tile(m_A, row, C, NT * C, C, C, C, TMA)
        b_v = read_tile(m_v, row, v_stride, L, width, C, BV, TMA)
        p_factors = factors + (base + chunk) * (FACTORS * C)
        read, write, _, _ = load_factors(p_factors, C)
        end = tl.load(p_factors + END * C)
        # compute and store
        write_tile(m_S, row_S, BK, NT * VP, BK, b_S, BV, BK, TMA)
        KS = tl.dot(b_S.to(b_k.dtype), tl.trans(b_k), input_precision="ieee")
        Y, size = as_operand(tl.trans(b_v).to(tl.float32) - read[None, :] * KS, b_A)  # (5.4)
        b_E = tl.dot(Y, tl.trans(b_A), input_precision="ieee") * size  # (9.3)
        b_S = tl.dot((b_E * write[None, :]).to(b_k.dtype), b_k, acc=b_S * end, input_precision="ieee")  # (5.6)
        write_tile(m_E, row, VP, NT * C, BV, tl.trans(b_E.to(E.dtype.element_ty)), C, BV, TMA)


# ------------------------------------------------------------------------------------------ pairs of a chunk's tokens


@triton.jit
def strict_decay(p_factors, C: tl.constexpr, EXACT: tl.constexpr):
    """Gamma_ij below the diagonal, 0 elsewhere: [C, C]   (7.1)

    EXACT takes the cumulative decays apart, as tiles.split_decay says; their sums are right to 5e-4 at the worst, after
    64 resets, which is below what 16-bit products keep.
    """
    i = tl.arange(0, C)
    whole, rest = tl.load(p_factors + WHOLE * C + i), tl.load(p_factors + REST * C + i)
    if EXACT:
        exponent = (whole[:, None] - whole[None, :]) + (rest[:, None] - rest[None, :])
    else:
        exponent = (whole + rest)[:, None] - (whole + rest)[None, :]
    return tl.exp2(tl.where(i[:, None] > i[None, :], exponent, float("-inf")))


@triton.jit
def weights(p_lengths, p_factors, scale, C: tl.constexpr, NORM: tl.constexpr):
    """What multiplies q to be a query, k to be a key with its sign changed, and k to be a key that is written, [C]."""
    i = tl.arange(0, C)
    beta = tl.load(p_factors + BETA * C + i)
    weight_q, weight_k = tl.full([C], scale, tl.float32), tl.full([C], -1.0, tl.float32)
    if NORM:
        length_k = tl.load(p_lengths + C + i)
        weight_q *= tl.load(p_lengths + i)
        weight_k *= length_k
        beta *= length_k
    return weight_q, weight_k, beta


@triton.jit
def no_gradients(
    dq, dk, dv, cu_seqlens, slot, h, T, N, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """0 for the tokens of no sequence: dv of value head h, and dq and dk if it is the first of its key head's."""
    token, of_none = tokens_of_none(cu_seqlens, slot, T, N, C, PACKED)
    rows = token * (HV * V) + h * V
    zero_rows(dv + rows, HV * V, of_none, V, C, BV)
    if h % (HV // H) == 0:
        rows = token * (H * K) + (h // (HV // H)) * K
        zero_rows(dq + rows, H * K, of_none, K, C, BV)
        zero_rows(dk + rows, H * K, of_none, K, C, BV)


@triton.jit
def zero_rows(x, stride, which, width: tl.constexpr, C: tl.constexpr, BV: tl.constexpr):
    """0 in the columns below width of some rows of x."""
    for first in range(0, width, BV):
        column = first + tl.arange(0, BV)
        p = x + tl.arange(0, C)[:, None] * stride + column[None, :]
        tl.store(p, tl.zeros([C, BV], x.dtype.element_ty), mask=which[:, None] & (column < width)[None, :])


@triton.jit
def one_head_of_pairs(
    hv, qk, kk, do, dv, factors, p_lengths, E, pairs, tops, within, token, left, slot, slots, scale,
    HV: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, VP: tl.constexpr, NORM: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """One value head of pairs_kernel, from q k^T and k k^T."""
    i, c = tl.arange(0, C), tl.arange(0, BV)
    unit, corner = hv.to(tl.int64) * slots + slot, (token * HV + hv) * V
    p_factors = factors + unit * (FACTORS * C)
    F, J = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for first in tl.static_range(0, VP, BV):
        b_E = tl.load(E + unit * (C * VP) + first + i[:, None] * VP + c[None, :])
        b_do = load_rows(do + corner + first, HV * V, i, c, left, V - first)
        b_dv = load_rows(dv + corner + first, HV * V, i, c, left, V - first)
        F = tl.dot(b_do, tl.trans(b_E), acc=F, input_precision="ieee")
        J = tl.dot(b_dv, tl.trans(b_E), acc=J, input_precision="ieee")
    weight_q, weight_k, beta = weights(p_lengths, p_factors, scale, C, NORM)
    Gamma = strict_decay(p_factors, C, EXACT)
    F *= weight_q[:, None]
    own = tl.where(i[:, None] == i[None, :], F, 0.0)  # of queries and their own keys
    F *= Gamma  # (9.7)
    J *= Gamma * weight_k[:, None]  # (9.8)
    store_pairs(pairs, tops, 2 * unit, (F + own) * beta[None, :], C)
    store_pairs(pairs, tops, 2 * unit + 1, J * beta[None, :], C)
    X, p_within = F * qk + J * kk, within + unit * (3 * C) + i
    tl.store(p_within + 2 * C, tl.sum(X + own * qk, 0))  # (9.10)
    X *= beta[None, :]
    tl.store(p_within, tl.sum(X.to(tl.float64), 1))  # (9.12)
    tl.store(p_within + C, tl.sum(X.to(tl.float64), 0))  # (9.12)


@triton.jit(do_not_specialize=["T", "N", "slots"])
def pairs_kernel(
    q, k, do, dv, factors, lengths, E, pairs, tops, within, dq, dk, cu_seqlens,
    T, N, slots, scale, q_stride, k_stride,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, PACKED: tl.constexpr, NORM: tl.constexpr,
    EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What passes between the tokens of one chunk and key head, for each value head: F and J, and X, which stays here.

    Writes pairs [HV, slots, 2, C, C], F and J with the scale of their rows and the beta of their columns, in the dtype
    of the products that they go into; tops [HV, slots, 2], what was taken out of them; and within [HV, slots, 3, C]
    (float64): sums of rows and of columns of X, and those over queries and keys of what dbeta gets.
    """
    h = tl.program_id(0) % H
    slot = tl.program_id(0) // H
    token, left = chunk_of_slot(cu_seqlens, slot, T, N, C, PACKED)
    if left <= 0:
        for r in range(HV // H):
            no_gradients(dq, dk, dv, cu_seqlens, slot, h * (HV // H) + r, T, N, H, HV, K, V, C, BV, PACKED)
        return

    i, w = tl.arange(0, C), tl.arange(0, BK)
    qk, kk = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for first in range(0, KP, BK):
        b_q = load_rows(q + token * q_stride + h * K + first, q_stride, i, w, left, K - first)
        b_k = load_rows(k + token * k_stride + h * K + first, k_stride, i, w, left, K - first)
        qk = tl.dot(b_q, tl.trans(b_k), acc=qk, input_precision="ieee")
        kk = tl.dot(b_k, tl.trans(b_k), acc=kk, input_precision="ieee")
    p_lengths = lengths + (h.to(tl.int64) * slots + slot) * (2 * C)
    for r in tl.range(0, HV // H, num_stages=STAGES):
        one_head_of_pairs(
            h * (HV // H) + r, qk, kk, do, dv, factors, p_lengths, E, pairs, tops, within, token, left, slot, slots,
            scale, HV, V, C, BV, VP, NORM, EXACT,
        )  # fmt: skip


@triton.jit
def store_pairs(pairs, tops, n, F, C: tl.constexpr):
    """F as matrix n of pairs."""
    i, top = tl.arange(0, C), 1.0
    if pairs.dtype.element_ty == tl.float16:  # which holds no numbers of any size
        top = tl.max(tl.max(tl.abs(F), 1), 0)
        top = tl.where(top > 1e-30, top, 1.0)
        F *= 1 / top
    tl.store(tops + n, top)
    tl.store(pairs + n * (C * C) + i[:, None] * C + i[None, :], F.to(pairs.dtype.element_ty))


# ------------------------------------------------------------------------------------------ gradients, all at once


@triton.jit
def through_norm(dx, x, length):
    """dx, the gradient of x/|x| over |x|, without what of it points along x: that is lost   (2.5)"""
    x = x.to(tl.float32) * length[:, None]
    return dx - x * tl.sum(x * dx, 1)[:, None]


@triton.jit
def over_values(
    do, dv, E, S, dS, left, HV: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    KP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """The sums over V of one_head, BK columns of K: do S^T, dv S^T, E dS'^T [C, BK] and S dS'^T [BK, BK]."""
    i, w, column = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    x, a, e = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    ends = tl.zeros([BK, BK], tl.float32)
    for first in tl.static_range(0, VP, BV):
        p_state = (first + column)[:, None] * KP + w[None, :]
        b_S, b_dS = tl.load(S + p_state), tl.load(dS + p_state)
        b_do = load_rows(do + first, HV * V, i, column, left, V - first)
        b_dv = load_rows(dv + first, HV * V, i, column, left, V - first)
        b_E = tl.load(E + first + i[:, None] * VP + column[None, :])
        x = tl.dot(b_do, b_S, acc=x, input_precision="ieee")
        a = tl.dot(b_dv, b_S, acc=a, input_precision="ieee")
        e = tl.dot(b_E, b_dS, acc=e, input_precision="ieee")
        ends = tl.dot(tl.trans(b_S), b_dS, acc=ends, input_precision="ieee")
    return x, a, e, ends


@triton.jit
def one_head(
    hv, dq, dk, b_q, b_k, do, dv, E, S, dS, pairs, tops, factors, sums, token, left, block, slot, slots,
    HV: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr,
):  # fmt: skip
    """One value head of gradients_kernel: (dq, dk) with its share."""
    i, w, two = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, 2)
    unit = hv.to(tl.int64) * slots + slot
    # load
    p_pairs = pairs + unit * (2 * C * C) + i[:, None] * C + i[None, :]
    b_F, b_J = tl.load(p_pairs), tl.load(p_pairs + C * C)
    top_F, top_J = tl.load(tops + 2 * unit), tl.load(tops + 2 * unit + 1)
    p_factors = factors + unit * (FACTORS * C) + i
    query, read = tl.load(p_factors + QUERY * C), tl.load(p_factors + READ * C)
    write = tl.load(p_factors + WRITE * C)
    # compute
    corner, state = (token * HV + hv) * V, unit * (VP * KP) + block * BK
    x, a, e, ends = over_values(
        do + corner, dv + corner, E + unit * (C * VP), S + state, dS + state, left, HV, V, C, BK, BV, KP, VP
    )  # fmt: skip
    x *= query[:, None]
    a *= -read[:, None]
    y = x * b_q.to(tl.float32) + a * b_k.to(tl.float32)
    z = e * b_k.to(tl.float32)
    p_sums = sums + ((block * HV + hv).to(tl.int64) * slots + slot) * (2 * C + BK)
    tl.store(p_sums + 2 * i[:, None] + two[None, :], tl.sum(tl.join(y, z), 1))  # (9.13), with one wait instead of two
    tl.store(p_sums + 2 * C + w, tl.sum(tl.where(w[:, None] == w[None, :], ends, 0.0), 1))  # (9.13)
    dq += x  # (9.7)
    dk += a + e * write[:, None]  # (9.8), (9.9)
    # Added up by hand: of products that start from another one's sum Triton gives all columns to every warp, and eight
    # warps would do the work of four twice.
    dq += tl.dot(b_F, b_k, input_precision="ieee") * top_F  # (9.7)
    dk += tl.dot(b_J, b_k, input_precision="ieee") * top_J  # (9.8)
    dk += tl.dot(tl.trans(b_F), b_q, input_precision="ieee") * top_F  # (9.9)
    dk += tl.dot(tl.trans(b_J), b_k, input_precision="ieee") * top_J  # (9.9)
    return dq, dk


@triton.jit(do_not_specialize=["T", "N", "slots"])
def gradients_kernel(
    q, k, do, dv, factors, lengths, E, S, dS, pairs, tops, dq, dk, sums, cu_seqlens,
    T, N, slots, q_stride, k_stride,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, PACKED: tl.constexpr, NORM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """BK columns of K of one chunk of one key head, and of all value heads that share it: they are summed here.

    Writes dq and dk [.., H, K], and sums [NK, HV, slots, 2 C + BK], which finish_kernel needs: y and, but for beta and
    the decay, z of every token; the diagonal of S dS'^T. The loop has the tiles of the next head on their way. None of
    them feeds a sum as well as products: on Hopper under Triton 3.6 it would get a single buffer, and the next copy
    could overwrite what is still read. So <S, dS'> is the trace of a product. Nor does a product add to what a sum
    reads: ptxas 12.8 moves the sum behind it, and dg is wrong. Where heads share keys of 128 numbers, Hopper runs the
    twin of this kernel in hopper.py.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    block = tl.program_id(0) % NK
    h = (tl.program_id(0) // NK) % H
    slot = tl.program_id(0) // NK // H
    token, left = chunk_of_slot(cu_seqlens, slot, T, N, C, PACKED)
    if left <= 0:  # pairs_kernel has seen to that
        return

    i, w = tl.arange(0, C), tl.arange(0, BK)
    first, width = block * BK, K - block * BK
    b_q = load_rows(q + token * q_stride + h * K + first, q_stride, i, w, left, width)
    b_k = load_rows(k + token * k_stride + h * K + first, k_stride, i, w, left, width)
    b_dq, b_dk = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    for r in tl.range(0, HV // H, num_stages=STAGES):
        b_dq, b_dk = one_head(
            h * (HV // H) + r, b_dq, b_dk, b_q, b_k, do, dv, E, S, dS, pairs, tops, factors, sums, token, left, block,
            slot, slots, HV, V, C, BK, BV, KP, VP,
        )  # fmt: skip
    if NORM and NK == 1:
        p_lengths = lengths + (h.to(tl.int64) * slots + slot) * (2 * C) + i
        b_dq = through_norm(b_dq, b_q, tl.load(p_lengths))
        b_dk = through_norm(b_dk, b_k, tl.load(p_lengths + C))
    corner = (token * H + h) * K + first
    store_rows(dq + corner, H * K, i, w, left, width, b_dq)
    store_rows(dk + corner, H * K, i, w, left, width, b_dk)


# ------------------------------------------------------------------------------------------ gates, and lengths of rows


@triton.jit(do_not_specialize=["T", "N", "slots"])
def finish_kernel(
    g, beta, A_log, dt_bias, cu_seqlens, factors, lengths, within, sums, dg, dbeta, share,
    T, N, slots, g_stride, beta_stride,
    H: tl.constexpr, HV: tl.constexpr, C: tl.constexpr, NK: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr,
    NORM: tl.constexpr, HAS_G: tl.constexpr, RAW_G: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_BETA: tl.constexpr,
    RAW_BETA: tl.constexpr,
):  # fmt: skip
    """The gradients of one chunk's gates, as they were given, from the sums of gradients_kernel: dg, dbeta [.., HV].

    share [.., HV] is what each token adds to the gradient of A_log, where g is raw.
    """
    h = tl.program_id(0) % HV
    slot = tl.program_id(0) // HV
    i, w = tl.arange(0, C), tl.arange(0, BK)
    token, left = chunk_of_slot(cu_seqlens, slot, T, N, C, PACKED)
    valid = i < left
    written = valid
    if left <= 0:
        token, written = tokens_of_none(cu_seqlens, slot, T, N, C, PACKED)

    # load
    p_within = within + (h.to(tl.int64) * slots + slot) * (3 * C) + i
    pairs = tl.load(p_within, mask=valid, other=0.0) - tl.load(p_within + C, mask=valid, other=0.0)
    d_beta = tl.load(p_within + 2 * C, mask=valid, other=0.0).to(tl.float32)
    y, to_end, from_last = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    ends, after = tl.zeros([BK], tl.float32), valid & (i > 0)
    for block in range(NK):
        p_sums = sums + ((block * HV + h).to(tl.int64) * slots + slot) * (2 * C + BK)
        y += tl.load(p_sums + 2 * i, mask=valid, other=0.0)
        to_end += tl.load(p_sums + 2 * i + 1, mask=valid, other=0.0)
        from_last += tl.load(p_sums + 2 * i - 1, mask=after, other=0.0)  # of the token before
        ends += tl.load(p_sums + 2 * C + w, mask=w < left * BK, other=0.0)
    p_factors = factors + (h.to(tl.int64) * slots + slot) * (FACTORS * C)
    b_beta = tl.load(p_factors + BETA * C + i, mask=valid, other=0.0)
    beta_last = tl.load(p_factors + BETA * C + i - 1, mask=after, other=0.0)
    end = tl.load(p_factors + END * C, mask=left > 0, other=0.0)

    if NORM:
        p_lengths = lengths + ((h // (HV // H)).to(tl.int64) * slots + slot) * (2 * C) + C + i
        length_k = tl.load(p_lengths, mask=valid, other=0.0)
        d_beta *= length_k
        to_end *= length_k
        from_last *= tl.load(p_lengths - 1, mask=after, other=0.0)

    # compute and store
    z = beta_last * late(p_factors, i - 1, after, left, C) * from_last
    # Across a chunk's first token lies no pair, and nothing passes a token that decays to 0: no rounding there.
    p_decays = p_factors + WHOLE * C + i
    whole = tl.load(p_decays, mask=after, other=0.0) - tl.load(p_decays - 1, mask=after, other=0.0)
    p_decays += (REST - WHOLE) * C
    rest = tl.load(p_decays, mask=after, other=0.0) - tl.load(p_decays - 1, mask=after, other=0.0)
    across = after & (power(whole, rest) > 0)
    d_g = tl.where(across, tl.cumsum(pairs, 0, reverse=True), 0.0).to(tl.float32)  # (9.11)
    d_g += tl.cumsum(y, 0, reverse=True) + tl.cumsum(z, 0) + tl.sum(ends, 0) * end  # (9.13)
    d_beta += late(p_factors, i, valid, left, C) * to_end
    at = (token + i) * HV + h
    if RAW_G:  # g = -exp(A_log) softplus(a), so that dg/dA_log = g and dg/da = g sigmoid(a) / softplus(a)   (7.6)
        a = tl.load(g + (token + i) * g_stride + h, mask=valid, other=0.0).to(tl.float32)
        if HAS_BIAS:
            a += tl.load(dt_bias + h).to(tl.float32)
        d_g *= log_decay(a, tl.load(A_log + h).to(tl.float32), 0.0)
        tl.store(share + at, tl.where(valid, d_g, 0.0), mask=written)
        d_g *= softplus_rate(a)
    if RAW_BETA:  # of sigmoid(b)   (7.6)
        b = tl.load(beta + (token + i) * beta_stride + h, mask=valid, other=0.0).to(tl.float32)
        d_beta *= b_beta * write_strength(-b)
    if HAS_G:
        tl.store(dg + at, tl.where(valid, d_g, 0.0).to(dg.dtype.element_ty), mask=written)
    if HAS_BETA:
        tl.store(dbeta + at, tl.where(valid, d_beta, 0.0).to(dbeta.dtype.element_ty), mask=written)


@triton.jit
def late(p_factors, i, mask, left, C: tl.constexpr):
    """gamma_C / gamma_i: what is left of token i at the chunk's end."""
    whole_C = tl.load(p_factors + WHOLE * C + C - 1, mask=left > 0, other=0.0)
    rest_C = tl.load(p_factors + REST * C + C - 1, mask=left > 0, other=0.0)
    whole = tl.load(p_factors + WHOLE * C + i, mask=mask, other=0.0)
    return power(whole_C - whole, rest_C - tl.load(p_factors + REST * C + i, mask=mask, other=0.0))


@triton.jit
def softplus_rate(x):
    """The derivative of log softplus: sigmoid(x) / softplus(x), which is 1 far below 0 and 1/x far above   (7.6)"""
    y = tl.exp(tl.where(x > 0, -x, x))
    softplus = tl.where(x > 0, x, 0.0) + log1p_exp(tl.where(x > 0, -x, x))
    return tl.where(x < -20, 1.0, tl.where(x > 0, 1.0, y) / ((1 + y) * softplus))


@triton.jit(do_not_specialize=["T", "N", "slots"])
def lengths_kernel(
    q, k, lengths, dq, dk, cu_seqlens, T, N, slots, q_stride, k_stride,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """What the L2 norm needs of whole rows: before gradients_kernel lengths [H, slots, 2, C], one over |q| and |k|;
    after it, where its programs see blocks of rows, LAST: dq and dk in place, as through_norm says."""
    h = tl.program_id(0) % H
    slot = tl.program_id(0) // H
    token, left = chunk_of_slot(cu_seqlens, slot, T, N, C, PACKED)
    if left <= 0:
        return
    i, column = tl.arange(0, C), tl.arange(0, BK)
    p_lengths = lengths + (h.to(tl.int64) * slots + slot) * (2 * C) + i
    corner = (token * H + h) * K
    b_q = load_rows(q + token * q_stride + h * K, q_stride, i, column, left, K)
    if LAST:
        b_dq = load_rows(dq + corner, H * K, i, column, left, K).to(tl.float32)
        store_rows(dq + corner, H * K, i, column, left, K, through_norm(b_dq, b_q, tl.load(p_lengths)))
    else:
        tl.store(p_lengths, inverse_lengths(b_q))
    b_k = load_rows(k + token * k_stride + h * K, k_stride, i, column, left, K)
    if LAST:
        b_dk = load_rows(dk + corner, H * K, i, column, left, K).to(tl.float32)
        store_rows(dk + corner, H * K, i, column, left, K, through_norm(b_dk, b_k, tl.load(p_lengths + C)))
    else:
        tl.store(p_lengths + C, inverse_lengths(b_k))
