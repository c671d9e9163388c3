"""Fused forward, second part: the state carried through the chunks of a sequence; and its affine map of a segment.

Everything is transposed, S^T [V, K]: rows of V are then the long side of every product, and what a product leaves in
registers is the left operand of the next one. With the factors of prep.py (A and P carry beta on the right):

    E = A (V - diag(gamma) K S)      the errors, one row a token                                   (9.3), (5.4)
    O = scale (diag(gamma) Q S + P E)                                                                     (5.5)
    S <- gamma_C S + K^T diag(beta gamma_C/gamma) E                                                       (5.6)

No factor W is ever formed.

The products with A and P take float16, which is eight times finer than bfloat16 where correlated keys make that matter,
but holds nothing above 65504 and is coarse below 1e-4. Taking the size out of every row of Y = V - diag(gamma) K S, as
prep.py does with P, costs a tenth of the time and is hardly ever needed: so a first pass goes without, looks at the
state it ends with, and if that is no number, or so small that digits may have been lost, leaves the program to a second
pass, which takes sizes out: of float16 inputs also those of the state and of what is written to it. A number that was
too large makes the state NaN for good, so that none is missed.
"""

import triton
import triton.language as tl

from .prep import END, FACTORS, as_operand, load_factors, unscaled
from .tiles import load_rows, sequence, store_rows

# A map that lets less than 2^-160 through is 0: the smallest float32 is 2^-149.
FORGOTTEN = tl.constexpr(-160.0)
CHUNKS_A_LOOK = tl.constexpr(8)
# Below a mean entry of 2^-15 the state may be less than 1000 times the distance of float16's smallest numbers.
LEAST_MEAN = tl.constexpr(2.0**-15)


@triton.jit
def rows_of(x, stride, length, width, BR: tl.constexpr, BC: tl.constexpr, TMA: tl.constexpr):
    """x, which points at the first row of a matrix [length, width], ready for read_tile and write_tile.

    With TMA a descriptor, which the copy engine reads; rows and columns beyond the matrix are 0 and never written.
    """
    if TMA:
        x = tl.make_tensor_descriptor(x, [tl.maximum(length, 1), width], [stride, 1], [BR, BC])
    return x


@triton.jit
def read_tile(x, row, stride, length, width, BR: tl.constexpr, BC: tl.constexpr, TMA: tl.constexpr):
    """Rows `row` and following of a matrix [length, width], as a tile [BR, BC]."""
    if TMA:
        tile = x.load([row, 0])
    else:
        corner = x + row.to(tl.int64) * stride
        tile = load_rows(corner, stride, tl.arange(0, BR), tl.arange(0, BC), length - row, width)
    return tile


@triton.jit
def write_tile(x, row, stride, length, width, tile, BR: tl.constexpr, BC: tl.constexpr, TMA: tl.constexpr):
    """Write what of a tile [BR, BC] lies inside of a matrix [length, width]."""
    if TMA:
        x.store([row, 0], tile.to(x.dtype))
    else:
        corner = x + row.to(tl.int64) * stride
        store_rows(corner, stride, tl.arange(0, BR), tl.arange(0, BC), length - row, width, tile)


@triton.jit
def step(S, b_k, b_v, b_A, read, write, end, SCALED: tl.constexpr = True):
    """One chunk: from the state S^T [BV, K] before it the state after it, and the errors of its tokens as E^T [BV, C],
    with what is left to multiply them by: if SCALED, E is that of rows of Y of largest entry 1, and [BV, 1] their
    sizes."""
    b_S, height = as_operand(S, b_k, SCALED)
    KS = tl.dot(b_S, tl.trans(b_k), input_precision="ieee") * height
    Y = tl.trans(b_v).to(tl.float32) - read[None, :] * KS  # (V - diag(gamma) K S)^T   (5.4)
    b_Y, size = as_operand(Y, b_A, SCALED)
    E = tl.dot(b_Y, tl.trans(b_A), input_precision="ieee")  # (9.3)
    late, width = as_operand(E * (size * write[None, :]), b_k, SCALED)
    if SCALED and b_k.dtype == tl.float16:
        S = S * end + tl.dot(late, b_k, input_precision="ieee") * width  # (5.6)
    else:
        S = tl.dot(late, b_k, acc=S * end, input_precision="ieee")  # (5.6)
    return S, E, size


@triton.jit
def carry(
    S, m_q, m_k, m_v, m_o, m_A, m_P, m_S, m_E, factors, base, first, last, L, width, NT, q_stride, k_stride, v_stride,
    o_stride, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VP: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr, SCALED: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """The state S^T [BV, BK] carried from chunk `first` to before chunk `last`; writes their outputs, and to KEEP, for
    the backward pass, the state before every chunk and its errors."""
    for chunk in tl.range(first, last, num_stages=STAGES):
        # load; neighbours that feed products alone share one arrival of the copy engine
        row = chunk * C
        row_S = chunk * VP
        b_k = read_tile(m_k, row, k_stride, L, K, C, BK, TMA)
        b_A = read_tile(m_A, row, C, NT * C, C, C, C, TMA)
        b_q = read_tile(m_q, row, q_stride, L, K, C, BK, TMA)
        b_P = read_tile(m_P, row, C, NT * C, C, C, C, TMA)
        b_v = read_tile(m_v, row, v_stride, L, width, C, BV, TMA)
        p_chunk = factors + (base + chunk) * (FACTORS * C)
        read, write, query, score = load_factors(p_chunk, C)
        end = tl.load(p_chunk + END * C)
        # compute
        b_S, height = as_operand(S, b_q, SCALED)
        if KEEP:
            write_tile(m_S, row_S, BK, NT * VP, BK, S.to(b_k.dtype), BV, BK, TMA)
        S, E, size = step(S, b_k, b_v, b_A, read, write, end, SCALED)
        if KEEP:
            write_tile(m_E, row, VP, NT * C, BV, tl.trans((E * size).to(b_k.dtype)), C, BV, TMA)
        O = tl.dot(b_S, tl.trans(b_q), input_precision="ieee") * (height * query[None, :])
        O += tl.dot(E.to(b_P.dtype), tl.trans(b_P), input_precision="ieee") * (size * score[None, :])  # (5.5)
        # store
        write_tile(m_o, row, o_stride, L, width, tl.trans(O.to(b_v.dtype)), C, BV, TMA)
    return S


@triton.jit
def compose(S, m_R, row, length, B, BK: tl.constexpr, TMA: tl.constexpr):
    """S R + B: the state across a segment, from its affine map (10.1). R is the sum of two halves, one below the other
    from a row of m_R on."""
    b_R = read_tile(m_R, row, BK, length, BK, BK, BK, TMA)  # in another order Triton 3.6 does not compile it
    size = 1.0
    if b_R.dtype == tl.float16:  # which holds no numbers of any size
        S, top = unscaled(S)
        size = top[:, None]
    high = S.to(b_R.dtype)
    low = (S - high.to(tl.float32)).to(b_R.dtype)
    S = tl.dot(high, b_R, input_precision="ieee")
    S = tl.dot(low, b_R, acc=S, input_precision="ieee")
    b_R = read_tile(m_R, row + BK, BK, length, BK, BK, BK, TMA)
    return tl.dot(high, b_R, acc=S, input_precision="ieee") * size + tl.load(B)


@triton.jit
def state_to_start(
    initial, initial_v, initial_k, m_R, B, forgets, first, step, count, h, HV, maps, V, corner,
    K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LV: tl.constexpr, HAS_INITIAL: tl.constexpr,
    SEGMENTED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The state S^T [BV, BK] that a program starts from: the initial one, taken through the maps of `count` segments,
    first, first + step and so on: those before its own; or those after it from the last one down, for the adjoint of
    the final state. corner: the first row; B: of the sequence's first map, each LV rows long."""
    row_v, row_k = corner + tl.arange(0, BV), tl.arange(0, BK)
    S = tl.zeros([BV, BK], tl.float32)
    if HAS_INITIAL:
        inside = (row_v < V)[:, None] & (row_k < K)[None, :]
        p_initial = initial + row_v[:, None] * initial_v + row_k[None, :] * initial_k
        S = tl.load(p_initial, mask=inside, other=0.0).to(tl.float32)
    if SEGMENTED:
        for r in tl.range(0, count, num_stages=1):
            z = (first + r * step) * HV + h
            p_B = B + z.to(tl.int64) * (LV * BK) + row_v[:, None] * BK + row_k[None, :]
            if tl.load(forgets + z) != 0:
                S = tl.load(p_B)  # (10.1) with R = 0
            else:
                S = compose(S, m_R, z * (2 * BK), maps * 2 * BK, p_B, BK, TMA)
    return S


@triton.jit
def write_state(
    x, S, corner, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr,
):  # fmt: skip
    """S^T [BV, BK] as rows `corner` and following of a matrix x [V, K], or as columns of [K, V] unless V_FIRST."""
    row_v, row_k = corner + tl.arange(0, BV), tl.arange(0, BK)
    if V_FIRST:
        x += row_v[:, None] * K + row_k[None, :]
    else:
        x += row_v[:, None] + row_k[None, :] * V
    tl.store(x, S.to(x.dtype.element_ty), mask=(row_v < V)[:, None] & (row_k < K)[None, :])


@triton.jit(do_not_specialize=["segments"])
def starts_kernel(
    R, B, forgets, initial, starts, segments, initial_n, initial_h, initial_v, initial_k,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, HAS_INITIAL: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """The states that the programs of scan_kernel start from, for its twin in hopper_scan.py: starts [N, segments, HV,
    V, K]."""
    NV: tl.constexpr = (V + BV - 1) // BV
    VP: tl.constexpr = NV * BV
    pid = tl.program_id(0)
    iv = pid % NV
    segment = (pid // NV) % segments
    h = (pid // NV // segments) % HV
    n = (pid // NV // segments // HV).to(tl.int64)
    maps = segments * HV
    m_R = rows_of(R + n * maps * (2 * BK * BK), BK, maps * 2 * BK, BK, BK, BK, TMA)
    if HAS_INITIAL:
        initial += n * initial_n + h.to(tl.int64) * initial_h
    S = state_to_start(
        initial, initial_v, initial_k, m_R, B + n * maps * (VP * BK), forgets + n * maps, 0, 1, segment, h, HV, maps, V,
        iv * BV, K, BK, BV, VP, HAS_INITIAL, True, TMA,
    )  # fmt: skip
    write_state(starts + ((n * segments + segment) * HV + h) * (V * K), S, iv * BV, K, V, BK, BV, True)


@triton.jit
def lost(S, entries):
    """Whether a state of so many entries is no number, or so small that float16 may have lost digits on the way."""
    # NaN and infinity stay what they are. All at once, for Triton 3.6 does not compile for Blackwell a sum from one
    # dimension to none of what comes of a product.
    total = tl.sum(tl.abs(S))
    return (total < LEAST_MEAN * entries) | (total == float("inf")) | (total != total)


@triton.jit(do_not_specialize=["T", "slots", "segments", "length"])
def scan_kernel(
    q, k, v, o, tiles, factors, initial, final, cu_seqlens, R, B, forgets, done, kept_S, kept_E,
    T, slots, segments, length, q_stride, k_stride, v_stride, initial_n, initial_h, initial_v, initial_k,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, V_FIRST: tl.constexpr,
    SEGMENTED: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, PASS: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """BV columns of V of one value head of one sequence, or of one of its segments, chunk after chunk.

    q, k, v: token rows; tiles, factors: see prep.py; initial: a state in any layout; R, B, forgets: see segment_kernel.
    Writes o [.., HV, V] and final [N, HV, V, K], or [N, HV, K, V] unless V_FIRST. PASS: 0 where float32 holds
    everything; 1 writes into done, one number a program, whether float16 did; 2 does what is not done. With KEEP also
    what states_kernel in backward.py makes, kept_S and kept_E.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    VP: tl.constexpr = NV * BV
    pid = tl.program_id(0)
    if PASS == 2:
        if tl.load(done + pid) != 0:
            return
    iv = pid % NV
    segment = (pid // NV) % segments
    h = (pid // NV // segments) % HV
    n = pid // NV // segments // HV
    start, L, slot = sequence(cu_seqlens, n, T, C, PACKED)
    NT = tl.cdiv(L, C)
    base = h.to(tl.int64) * slots + slot
    width = V - iv * BV
    corner_o = (start * HV + h) * V + iv * BV
    m_k = rows_of(k + start * k_stride + (h // (HV // H)) * K, k_stride, L, K, C, BK, TMA)
    m_q = rows_of(q + start * q_stride + (h // (HV // H)) * K, q_stride, L, K, C, BK, TMA)
    m_v = rows_of(v + start * v_stride + h * V + iv * BV, v_stride, L, width, C, BV, TMA)
    m_o = rows_of(o + corner_o, HV * V, L, width, C, BV, TMA)
    m_A = rows_of(tiles + base * (C * C), C, NT * C, C, C, C, TMA)
    m_P = rows_of(tiles + ((h + HV).to(tl.int64) * slots + slot) * (C * C), C, NT * C, C, C, C, TMA)

    m_S, m_E = kept_S, kept_E
    if KEEP:
        m_S = rows_of(kept_S + (base * VP + iv * BV) * BK, BK, NT * VP, BK, BV, BK, TMA)
        m_E = rows_of(kept_E + base * C * VP + iv * BV, VP, NT * C, BV, C, BV, TMA)

    first, last, maps = 0, NT, segments * HV
    m_R = R
    if HAS_INITIAL:
        initial += n.to(tl.int64) * initial_n + h.to(tl.int64) * initial_h
    if SEGMENTED:
        first = segment * length
        last = tl.minimum(first + length, NT)
        m_R = rows_of(R + n.to(tl.int64) * maps * (2 * BK * BK), BK, maps * 2 * BK, BK, BK, BK, TMA)
        B += n.to(tl.int64) * maps * (VP * BK)
        forgets += n.to(tl.int64) * maps

    S = state_to_start(
        initial, initial_v, initial_k, m_R, B, forgets, 0, 1, segment, h, HV, maps, V, iv * BV,
        K, BK, BV, VP, HAS_INITIAL, SEGMENTED, TMA,
    )  # fmt: skip
    S = carry(
        S, m_q, m_k, m_v, m_o, m_A, m_P, m_S, m_E, factors, base, first, last, L, width, NT, q_stride, k_stride,
        v_stride, HV * V, K, C, BK, BV, VP, TMA, STAGES, PASS == 2, KEEP,
    )  # fmt: skip
    if PASS == 1:
        again = lost(S, tl.minimum(BV, width) * K) & (first < last)
        tl.store(done + pid, 1 - again.to(tl.int32))

    if HAS_FINAL:
        if segment == segments - 1:
            write_state(final + (n.to(tl.int64) * HV + h) * (K * V), S, iv * BV, K, V, BK, BV, V_FIRST)


@triton.jit
def remembered(p_bound, apart, chunks):
    """(how many chunks at one end of a segment must be run for its map, whether what crosses that end knows nothing of
    what is beyond the other one).

    p_bound: of the chunk at that end, the log2 bound of what a chunk's map lets through; apart: from there to the next
    one's. The product of the last few maps may be 0 already; then what lies before them has no say in the state at the
    segment's end, and nothing is lost by starting there from any state at all. In reverse, for the adjoint, it is the
    first few.
    """
    left, through = chunks, 0.0
    while (left > 0) & (through > FORGOTTEN):
        looked_at = chunks - left + tl.arange(0, CHUNKS_A_LOOK)
        through += tl.sum(tl.load(p_bound + looked_at.to(tl.int64) * apart, mask=looked_at < chunks, other=0.0), 0)
        left -= CHUNKS_A_LOOK
    return chunks - tl.maximum(left, 0), through <= FORGOTTEN


@triton.jit
def empty_or_unit(block, NV: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr):
    """What a block of a segment's map is run from [BV, BK]: 0, which gives one of the NV blocks of B, or rows of I,
    which give rows of R."""
    row, column = (block - NV) * BV + tl.arange(0, BV), tl.arange(0, BK)
    return tl.where((row[:, None] == column[None, :]) & (block >= NV), 1.0, 0.0)


@triton.jit
def write_map(R, B, z, S, block, NV: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr):
    """What empty_or_unit has become, as a block of map z: of R in two halves."""
    row, column = tl.arange(0, BV), tl.arange(0, BK)
    if block < NV:
        tl.store(B + z * (NV * BV * BK) + (block * BV + row)[:, None] * BK + column[None, :], S)
    else:
        row_R = (block - NV) * BV + row
        p_R = R + z * (2 * BK * BK) + row_R[:, None] * BK + column[None, :]
        high = S.to(R.dtype.element_ty)
        inside = (row_R < BK)[:, None]
        tl.store(p_R, high, mask=inside)
        tl.store(p_R + BK * BK, (S - high.to(tl.float32)).to(R.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T", "slots", "segments", "length"])
def segment_kernel(
    k, v, tiles, factors, R, B, forgets, T, slots, segments, length, k_stride, v_stride,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The affine map S <- S R + B of a segment of `length` chunks (the last segment's is not needed)   (10.1).

    The same steps, started elsewhere: from S = 0 on V they give B, from S = I on V = 0 they give R. A program does BV
    rows of either. R [.., 2, BK, BK] is kept as two halves in the dtype of the products: the second is what the first
    has rounded away. B is [.., V, BK] in float32, V filled up to whole blocks. Where the decays leave nothing of the
    state before the segment, forgets is 1, R is 0 and not written, and B takes the last few chunks only. So a head
    that forgets costs next to nothing here, and one that remembers as much again as its scan; nothing is dropped.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    NR: tl.constexpr = (BK + BV - 1) // BV
    pid = tl.program_id(0)
    block = pid % (NV + NR)
    h = (pid // (NV + NR)) % HV
    segment = (pid // (NV + NR) // HV) % (segments - 1)
    n = pid // (NV + NR) // HV // (segments - 1)
    of_B = block < NV
    iv = tl.where(of_B, block, 0)
    start = n.to(tl.int64) * T
    base = h.to(tl.int64) * slots + n * tl.cdiv(T, C)
    z = ((n * segments + segment) * HV + h).to(tl.int64)
    last = (segment + 1) * length
    p_last = factors + (base + last - 1) * (FACTORS * C)
    chunks, forgotten = remembered(p_last + END * C + 1, -FACTORS * C, length)
    if block == NV:
        tl.store(forgets + z, forgotten.to(tl.int32))
    if forgotten & (block >= NV):
        return
    width = V - iv * BV
    m_k = rows_of(k + start * k_stride + (h // (HV // H)) * K, k_stride, T, K, C, BK, TMA)
    m_v = rows_of(v + start * v_stride + h * V + iv * BV, v_stride, T, width, C, BV, TMA)
    NT = tl.cdiv(T, C)
    m_A = rows_of(tiles + base * (C * C), C, NT * C, C, C, C, TMA)
    S = empty_or_unit(block, NV, BV, BK)

    for chunk in tl.range(last - chunks, last, num_stages=STAGES):
        row_C = chunk * C
        b_k = read_tile(m_k, row_C, k_stride, T, K, C, BK, TMA)
        b_A = read_tile(m_A, row_C, C, NT * C, C, C, C, TMA)
        b_v = read_tile(m_v, row_C, v_stride, T, width, C, BV, TMA)
        p_factors = factors + (base + chunk) * (FACTORS * C)
        read, write, _, _ = load_factors(p_factors, C)
        end = tl.load(p_factors + END * C)
        b_v = tl.where(of_B, b_v, 0.0)
        S, _, _ = step(S, b_k, b_v, b_A, read, write, end)

    write_map(R, B, z, S, block, NV, BV, BK)
