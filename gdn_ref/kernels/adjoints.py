"""Fused backward, its scan in reverse: the adjoint of the state carried from the last chunk of a sequence to its first;
and its affine map of a segment. What it is part of, backward.py says.

As in scan.py everything is transposed, dS^T [V, K], and a sequence is cut into segments where heads are few. For what
a step is to S, S^T R + B row by row, a step in reverse is to dS, with R transposed and another B; and the maps compose
from the last segment down   (10.1).
"""

import triton
import triton.language as tl

from .prep import END, FACTORS, as_operand, load_factors
from .scan import empty_or_unit, read_tile, remembered, rows_of, state_to_start, write_map, write_state, write_tile
from .tiles import sequence


@triton.jit
def step_back(dS, b_q, b_k, b_do, b_A, b_P, read, write, query, score, end):
    """One chunk: from the adjoint dS'^T [BV, K] of the state after it that of the state before it, and dv^T [BV, C]."""
    b_do = tl.trans(b_do).to(tl.float32)
    X = tl.dot(dS.to(b_k.dtype), tl.trans(b_k), input_precision="ieee") * write[None, :]
    dS = tl.dot((b_do * query[None, :]).to(b_q.dtype), b_q, acc=dS * end, input_precision="ieee")  # (9.6)
    b_dP, size = as_operand(b_do * score[None, :], b_P)
    X += tl.dot(b_dP, b_P, input_precision="ieee") * size  # (9.4)
    X, size = as_operand(X, b_A)
    dv = tl.dot(X, b_A, input_precision="ieee") * size  # (9.5)
    return tl.dot((dv * -read[None, :]).to(b_k.dtype), b_k, acc=dS, input_precision="ieee"), dv


@triton.jit
def carry_back(
    dS, m_q, m_k, m_do, m_dv, m_A, m_P, m_dS, factors, base, first, last, L, width, NT, q_stride, k_stride, of_do,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    VP: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, MAP: tl.constexpr,
):  # fmt: skip
    """The adjoint dS^T [BV, BK] of the state before chunk `last`, carried back to before chunk `first`; writes that of
    the state after every chunk, and dv. For a MAP nothing is written, and do is 0 unless of_do."""
    for r in tl.range(0, last - first, num_stages=STAGES):
        # load; do goes into products by way of registers, the others straight away: none does both. A and P which the
        # forward has kept are float16 for bfloat16.
        chunk = last - 1 - r
        row = chunk * C
        b_k = read_tile(m_k, row, k_stride, L, K, C, BK, TMA)
        b_P = read_tile(m_P, row, C, NT * C, C, C, C, TMA).to(b_k.dtype)
        b_A = read_tile(m_A, row, C, NT * C, C, C, C, TMA).to(b_k.dtype)
        b_q = read_tile(m_q, row, q_stride, L, K, C, BK, TMA)
        b_do = read_tile(m_do, row, HV * V, L, width, C, BV, TMA)
        p_factors = factors + (base + chunk) * (FACTORS * C)
        read, write, query, score = load_factors(p_factors, C)
        end = tl.load(p_factors + END * C)
        # compute and store
        if MAP:
            b_do = tl.where(of_do, b_do, 0.0)
        else:
            write_tile(m_dS, chunk * VP, BK, NT * VP, BK, dS, BV, BK, TMA)
        dS, b_dv = step_back(dS, b_q, b_k, b_do, b_A, b_P, read, write, query, score, end)
        if not MAP:
            write_tile(m_dv, row, HV * V, L, width, tl.trans(b_dv.to(b_do.dtype)), C, BV, TMA)
    return dS


@triton.jit(do_not_specialize=["T", "slots", "segments", "length"])
def adjoints_kernel(
    q, k, do, tiles, factors, dfinal, R, B, forgets, dS, dv, dinitial, cu_seqlens,
    T, slots, segments, length, q_stride, k_stride, final_n, final_h, final_v, final_k,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, VP: tl.constexpr, PACKED: tl.constexpr, HAS_DFINAL: tl.constexpr,
    HAS_DINITIAL: tl.constexpr, V_FIRST: tl.constexpr, SEGMENTED: tl.constexpr, TMA: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The scan in reverse: BV columns of V of one value head of one sequence, or of one of its segments, from its last
    chunk to its first.

    do: [.., HV, V]; dfinal: the gradient of the final state in any layout; R, B, forgets: see adjoint_segment_kernel.
    Writes dS [HV, slots, VP, BK], the adjoint of the state after every chunk, transposed as S is; dv [.., HV, V];
    dinitial [N, HV, V, K], or [N, HV, K, V] unless V_FIRST.
    """
    NV: tl.constexpr = VP // BV
    pid = tl.program_id(0)
    iv = pid % NV
    segment = (pid // NV) % segments
    h = (pid // NV // segments) % HV
    n = pid // NV // segments // HV
    start, L, slot = sequence(cu_seqlens, n, T, C, PACKED)
    NT = tl.cdiv(L, C)
    base = h.to(tl.int64) * slots + slot
    width = V - iv * BV
    m_q = rows_of(q + start * q_stride + (h // (HV // H)) * K, q_stride, L, K, C, BK, TMA)
    m_k = rows_of(k + start * k_stride + (h // (HV // H)) * K, k_stride, L, K, C, BK, TMA)
    m_do = rows_of(do + (start * HV + h) * V + iv * BV, HV * V, L, width, C, BV, TMA)
    m_dv = rows_of(dv + (start * HV + h) * V + iv * BV, HV * V, L, width, C, BV, TMA)
    m_A = rows_of(tiles + base * (C * C), C, NT * C, C, C, C, TMA)
    m_P = rows_of(tiles + ((h + HV).to(tl.int64) * slots + slot) * (C * C), C, NT * C, C, C, C, TMA)
    m_dS = rows_of(dS + (base * VP + iv * BV) * BK, BK, NT * VP, BK, BV, BK, TMA)

    first, last, maps = 0, NT, segments * HV
    m_R = R
    if HAS_DFINAL:
        dfinal += n.to(tl.int64) * final_n + h.to(tl.int64) * final_h
    if SEGMENTED:
        first = segment * length
        last = tl.minimum(first + length, NT)
        m_R = rows_of(R + n.to(tl.int64) * maps * (2 * BK * BK), BK, maps * 2 * BK, BK, BK, BK, TMA)
        B += n.to(tl.int64) * maps * (VP * BK)
        forgets += n.to(tl.int64) * maps

    b_dS = state_to_start(
        dfinal, final_v, final_k, m_R, B, forgets, segments - 1, -1, segments - 1 - segment, h, HV, maps, V, iv * BV,
        K, BK, BV, VP, HAS_DFINAL, SEGMENTED, TMA,
    )  # fmt: skip
    b_dS = carry_back(
        b_dS, m_q, m_k, m_do, m_dv, m_A, m_P, m_dS, factors, base, first, last, L, width, NT, q_stride, k_stride, True,
        HV, K, V, C, BK, BV, VP, TMA, STAGES, False,
    )  # fmt: skip

    if HAS_DINITIAL:
        if segment == 0:
            write_state(dinitial + (n.to(tl.int64) * HV + h) * (K * V), b_dS, iv * BV, K, V, BK, BV, V_FIRST)


@triton.jit(do_not_specialize=["T", "slots", "segments", "length"])
def adjoint_segment_kernel(
    q, k, do, tiles, factors, R, B, forgets, T, slots, segments, length, q_stride, k_stride,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, VP: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The affine map dS <- dS R + B of a segment of `length` chunks, or of fewer, the last (the first segment's is not
    needed)   (10.1).

    What segment_kernel in scan.py is to the scan this is to the scan in reverse, and writes the same: from dS = 0 on do
    the steps give B, from dS = I on do = 0 they give R. Where the decays leave nothing of what comes after the segment,
    forgets is 1, R is not written, and B takes the first few chunks only.
    """
    NV: tl.constexpr = VP // BV
    NR: tl.constexpr = (BK + BV - 1) // BV
    pid = tl.program_id(0)
    block = pid % (NV + NR)
    h = (pid // (NV + NR)) % HV
    segment = 1 + (pid // (NV + NR) // HV) % (segments - 1)
    n = pid // (NV + NR) // HV // (segments - 1)
    of_B = block < NV
    iv = tl.where(of_B, block, 0)
    start, NT = n.to(tl.int64) * T, tl.cdiv(T, C)
    base = h.to(tl.int64) * slots + n * NT
    z = ((n * segments + segment) * HV + h).to(tl.int64)
    first = segment * length
    p_first = factors + (base + first) * (FACTORS * C)
    chunks, forgotten = remembered(p_first + END * C + 1, FACTORS * C, tl.minimum(length, NT - first))
    if block == NV:
        tl.store(forgets + z, forgotten.to(tl.int32))
    if forgotten & (block >= NV):
        return
    width = V - iv * BV
    m_q = rows_of(q + start * q_stride + (h // (HV // H)) * K, q_stride, T, K, C, BK, TMA)
    m_k = rows_of(k + start * k_stride + (h // (HV // H)) * K, k_stride, T, K, C, BK, TMA)
    m_do = rows_of(do + (start * HV + h) * V + iv * BV, HV * V, T, width, C, BV, TMA)
    m_A = rows_of(tiles + base * (C * C), C, NT * C, C, C, C, TMA)
    m_P = rows_of(tiles + ((h + HV).to(tl.int64) * slots + n * NT) * (C * C), C, NT * C, C, C, C, TMA)
    dS = empty_or_unit(block, NV, BV, BK)
    dS = carry_back(
        dS, m_q, m_k, m_do, m_do, m_A, m_P, m_do, factors, base, first, first + chunks, T, width, NT, q_stride,
        k_stride, of_B, HV, K, V, C, BK, BV, VP, TMA, STAGES, True,
    )  # fmt: skip
    write_map(R, B, z, dS, block, NV, BV, BK)
