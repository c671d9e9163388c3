"""scan_kernel of scan.py for Hopper, in Gluon: heads 128 wide, bfloat16. A twin, of the same equations.

What plain Triton does not let one say is said here: products that do not depend on each other are in flight together,
and what the next state does not need is done while that state is made. A step is a chain of three products, K S, A Y
and the new state; Q S runs behind the first, P E ahead of the last. Above their diagonals A and P are 0, which is not
fetched.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .hopper import SHARED, barrier, begin_copy
from .prep import END, FACTORS, QUERY, READ, SCORE, WRITE
from .scan import lost
from .tiles import sequence

PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.constexpr_function
def rows_layout(width, warps):
    """Where the numbers of a tile of 16-bit rows lie as they are copied: 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [32 * 8 // width, width // 8], [warps, 1], [1, 0])


@gluon.jit
def begin_rows(tile, x, row, eighth, rows, WARPS: gl.constexpr, LOWER: gl.constexpr):
    """Begin to copy rows of x, from `row` on, into a tile in shared memory; from row `rows` on they become 0, and so
    does, to LOWER, what lies above the diagonal, but for what comes with a sector that does not."""
    ROWS: gl.constexpr = rows_layout(tile.shape[1], WARPS)
    i = gl.arange(0, tile.shape[0], gl.SliceLayout(1, ROWS))[:, None]
    j = gl.arange(0, tile.shape[1], gl.SliceLayout(0, ROWS))[None, :]
    wanted = (row + i < rows) & (j >= 0)
    if LOWER:
        wanted = j // 16 <= i // 16
    # in 16 bytes, of which 32 bits count enough, and from `row`, which every step has anew: or addresses would be kept
    # from step to step, and spill
    begin_copy(tile, x + j + ((row + i) * eighth).to(gl.int64) * 8, mask=wanted)


@gluon.jit
def begin_chunk(
    chunk, last, b_k, b_q, b_v, b_A, b_P, b_factors, k, q, v, A, P, factors, L, k_eighth, q_eighth, v_eighth,
    C: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Begin to copy a chunk's tiles, if there is such a chunk; one group either way."""
    if chunk < last:
        row = chunk * C
        begin_rows(b_k, k, row, k_eighth, L, WARPS, False)
        begin_rows(b_q, q, row, q_eighth, L, WARPS, False)
        begin_rows(b_v, v, row, v_eighth, L, WARPS, False)
        begin_rows(b_A, A, row, C // 8, L, WARPS, True)
        begin_rows(b_P, P, row, C // 8, L, WARPS, True)
        ROWS: gl.constexpr = gl.BlockedLayout([1, 16 // WARPS], [2, 16], [WARPS, 1], [1, 0])
        i = gl.arange(0, FACTORS, gl.SliceLayout(1, ROWS))[:, None]
        j = gl.arange(0, C, gl.SliceLayout(0, ROWS))[None, :]
        begin_copy(b_factors, factors + chunk.to(gl.int64) * (FACTORS * C) + i * C + j)
    async_copy.commit_group()


@gluon.jit
def store_rows(x, stride, left, tile, WARPS: gl.constexpr):
    """A tile in shared memory as rows of x, those before `left`."""
    ROWS: gl.constexpr = rows_layout(tile.shape[1], WARPS)
    i = gl.arange(0, tile.shape[0], gl.SliceLayout(1, ROWS))[:, None]
    j = gl.arange(0, tile.shape[1], gl.SliceLayout(0, ROWS))[None, :]
    gl.store(x + i * stride + j, tile.load(ROWS), mask=(i < left) & (j >= 0))


@gluon.jit(do_not_specialize=["T", "slots", "segments", "length"])
def hopper_scan_kernel(
    q, k, v, o, tiles, factors, initial, final, cu_seqlens, done, kept_S, kept_E,
    T, slots, segments, length, q_eighth, k_eighth, v_eighth, initial_n, initial_h, initial_v, initial_k,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr,
    PACKED: gl.constexpr, HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr, V_FIRST: gl.constexpr,
    KEEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """BV columns of V of one value head of one sequence, or of one of its segments, chunk after chunk.

    As scan_kernel in its first pass, but initial has the state before every segment. Strides come divided by 8, so that
    the compiler knows that rows begin at multiples of 16 bytes. STAGES: chunks whose tiles are here or on their way.
    """
    WARPS: gl.constexpr = BV // 16
    TOKENS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])  # of a product [BV, C]
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])  # of [BV, K]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    LEFT_OF_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    dtype: gl.constexpr = k.dtype.element_ty
    NV: gl.constexpr = V // BV
    pid = gl.program_id(0)
    iv = pid % NV
    segment = (pid // NV) % segments
    h = (pid // NV // segments) % HV
    n = pid // NV // segments // HV
    start, L, slot = sequence(cu_seqlens, n, T, C, PACKED)
    first = segment * length
    last = gl.minimum(first + length, gl.cdiv(L, C))
    base = h.to(gl.int64) * slots + slot
    k += start * (k_eighth * 8) + (h // (HV // H)) * K
    q += start * (q_eighth * 8) + (h // (HV // H)) * K
    v += start * (v_eighth * 8) + h * V + iv * BV
    o += (start * HV + h) * V + iv * BV
    A = tiles + base * (C * C)
    P = tiles + ((h + HV).to(gl.int64) * slots + slot) * (C * C)
    factors += base * (FACTORS * C)

    b_k = gl.allocate_shared_memory(dtype, [STAGES, C, K], SHARED)
    b_q = gl.allocate_shared_memory(dtype, [STAGES, C, K], SHARED)
    b_v = gl.allocate_shared_memory(dtype, [STAGES, C, BV], SHARED)
    b_A = gl.allocate_shared_memory(tiles.dtype.element_ty, [STAGES, C, C], SHARED)
    b_P = gl.allocate_shared_memory(tiles.dtype.element_ty, [STAGES, C, C], SHARED)
    b_factors = gl.allocate_shared_memory(gl.float32, [STAGES, FACTORS, C], PLAIN)
    b_o = gl.allocate_shared_memory(dtype, [C, BV], SHARED)  # on their way out
    if KEEP:
        kept_S += (base * V + iv * BV) * K
        kept_E += base * (C * V) + iv * BV
        b_S = gl.allocate_shared_memory(dtype, [BV, K], SHARED)
    for ahead in gl.static_range(STAGES - 1):
        begin_chunk(
            first + ahead, last, b_k.index(ahead), b_q.index(ahead), b_v.index(ahead), b_A.index(ahead),
            b_P.index(ahead), b_factors.index(ahead), k, q, v, A, P, factors, L, k_eighth, q_eighth, v_eighth, C, WARPS,
        )  # fmt: skip

    row_v = (iv * BV + gl.arange(0, BV, gl.SliceLayout(1, STATE)))[:, None]
    row_k = gl.arange(0, K, gl.SliceLayout(0, STATE))[None, :]
    S = gl.zeros([BV, K], gl.float32, STATE)
    if HAS_INITIAL:
        initial += (n * segments + segment).to(gl.int64) * initial_n + h.to(gl.int64) * initial_h
        S = gl.load(initial + row_v * initial_v + row_k * initial_k).to(gl.float32)
    p_end = factors + (first.to(gl.int64) * FACTORS + END) * C
    nothing = gl.zeros([BV, C], gl.float32, TOKENS)
    for chunk in range(first, last):
        # load
        stage, free = (chunk - first) % STAGES, (chunk - first + STAGES - 1) % STAGES
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        barrier()
        begin_chunk(
            chunk + STAGES - 1, last, b_k.index(free), b_q.index(free), b_v.index(free), b_A.index(free),
            b_P.index(free), b_factors.index(free), k, q, v, A, P, factors, L, k_eighth, q_eighth, v_eighth, C, WARPS,
        )  # fmt: skip
        # compute and store
        state = S.to(dtype)
        left = gl.convert_layout(state, LEFT)
        KS = warpgroup_mma(left, b_k.index(stage).permute([1, 0]), nothing, use_acc=False, is_async=True)
        O = warpgroup_mma(left, b_q.index(stage).permute([1, 0]), nothing, use_acc=False, is_async=True)
        if KEEP:
            b_S.store(state)
            barrier()
            store_rows(kept_S + chunk.to(gl.int64) * (V * K), K, BV, b_S, WARPS)
        numbers = b_factors.index(stage)
        read = numbers.slice(READ, 1).load(TOKENS)
        b_Y = b_v.index(stage).permute([1, 0]).load(TOKENS).to(gl.float32)
        end = gl.load(p_end)  # while products run; a chunk ahead it would take registers that are not there
        p_end += FACTORS * C
        KS, left = warpgroup_mma_wait(1, deps=[KS, left])
        Y = gl.convert_layout((b_Y - read * KS).to(tiles.dtype.element_ty), LEFT)  # (5.4)
        E = warpgroup_mma(Y, b_A.index(stage).permute([1, 0]), nothing, use_acc=False, is_async=True)  # (9.3)
        write = numbers.slice(WRITE, 1).load(TOKENS)
        S *= end
        E, O, Y, left = warpgroup_mma_wait(0, deps=[E, O, Y, left])
        b_E = gl.convert_layout(E.to(tiles.dtype.element_ty), LEFT)
        PE = warpgroup_mma(b_E, b_P.index(stage).permute([1, 0]), nothing, use_acc=False, is_async=True)
        late = gl.convert_layout((E * write).to(dtype), LEFT_OF_STATE)
        S = warpgroup_mma(late, b_k.index(stage), S, is_async=True)  # (5.6)
        if KEEP:
            b_o.permute([1, 0]).store(E.to(dtype))
            barrier()
            store_rows(kept_E + chunk.to(gl.int64) * (C * V), V, C, b_o, WARPS)
        O *= numbers.slice(QUERY, 1).load(TOKENS)
        score = numbers.slice(SCORE, 1).load(TOKENS)
        PE, b_E = warpgroup_mma_wait(1, deps=[PE, b_E])
        b_o.permute([1, 0]).store((O + PE * score).to(dtype))  # (5.5)
        barrier()
        store_rows(o + (chunk * C).to(gl.int64) * (HV * V), HV * V, L - chunk * C, b_o, WARPS)
        S, late = warpgroup_mma_wait(0, deps=[S, late])

    again = lost(S, BV * K) & (first < last)
    gl.store(done + pid, 1 - again.to(gl.int32))
    if HAS_FINAL:
        if segment == segments - 1:
            p_final = final + (n.to(gl.int64) * HV + h) * (K * V)
            if V_FIRST:
                p_final += row_v * K + row_k
            else:
                p_final += row_v + row_k * V
            gl.store(p_final, S)
