"""gradients_kernel of backward.py for Hopper, in Gluon: heads 128 wide, bfloat16. A twin, of the same equations.

What plain Triton does not let one say is said here: what lies where, and when it is loaded.

    do and dv lie one above the other, so do q and k, F and J, and what becomes dq and dk: products of 128 rows, for two
    warpgroups. A program has all columns of K, so that do, dv and E come in once.
    Of a head's products all but two are begun at once, and sums are made while they run. As soon as all have ended,
    the next head's tiles are on their way, of S and dS' those of the next but one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .prep import FACTORS, QUERY, READ, WRITE, chunk_of_slot

# The names of both have changed since Triton 3.6.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
begin_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

WARPS = 8
# Where the numbers of a tile lie: in rows, as they are copied, and as products of 128 and of 64 rows leave them.
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
TALL = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 128, 16]))
FLAT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16]))
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
SHARED_SUMS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))


@gluon.jit
def copy_rows(tile, x, stride, left):
    """Begin to copy rows of x into a tile in shared memory; rows from `left` on become 0."""
    i = gl.arange(0, tile.shape[0], gl.SliceLayout(1, ROWS))[:, None]
    j = gl.arange(0, tile.shape[1], gl.SliceLayout(0, ROWS))[None, :]
    begin_copy(tile, x + i * stride + j, mask=(i < left) & (j >= 0))


@gluon.jit
def copy_tokens(
    dodv, b_E, b_FJ, do, dv, E, pairs, unit, corner, left, HV: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Begin to copy what a value head has for each token of a chunk: do above dv, E, and F above J."""
    copy_rows(dodv.slice(0, C), do + corner, HV * V, left)
    copy_rows(dodv.slice(C, C), dv + corner, HV * V, left)
    copy_rows(b_E, E + unit * (C * V), V, C)
    copy_rows(b_FJ, pairs + unit * (2 * C * C), C, 2 * C)


@gluon.jit
def copy_states(b_S, b_dS, S, dS, unit, K: gl.constexpr, V: gl.constexpr):
    """Begin to copy S and dS'."""
    copy_rows(b_S, S + unit * (V * K), K, V)
    copy_rows(b_dS, dS + unit * (V * K), K, V)


@gluon.jit
def ends(b_S, b_dS, p_ends, block, V: gl.constexpr, K: gl.constexpr):
    """<S, dS'> as 128 sums, 64 in each block of sums: first what a thread has, then what its neighbour does   (9.13)"""
    own = gl.zeros([16, K], gl.float32, ROWS)
    for first in gl.static_range(0, V, 16):
        own += b_S.slice(first, 16).load(ROWS).to(gl.float32) * b_dS.slice(first, 16).load(ROWS).to(gl.float32)
    own = gl.sum(gl.reshape(gl.sum(gl.reshape(own, [16, K // 8, 8]), 2), [8, 2, K // 8]), 1)
    i = gl.arange(0, 8, gl.SliceLayout(1, own.type.layout))[:, None]
    j = gl.arange(0, K // 8, gl.SliceLayout(0, own.type.layout))[None, :]
    gl.store(p_ends + (i % 4) * (K // 8) + j + gl.where(i < 4, 0, block), own)


@gluon.jit
def store_gradient(
    dx, b_dx, b_x, p_lengths, left, H: gl.constexpr, C: gl.constexpr, K: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """b_dx [C, K] as rows of dx [.., H, K]; where x was normalised, without what of it points along x   (2.5)"""
    if NORM:
        x = b_x.load(FLAT).to(gl.float32) * gl.load(p_lengths + gl.arange(0, C, gl.SliceLayout(1, FLAT)))[:, None]
        b_dx -= x * gl.sum(x * b_dx, 1)[:, None]
    i = gl.arange(0, C, gl.SliceLayout(1, ROWS))[:, None]
    j = gl.arange(0, K, gl.SliceLayout(0, ROWS))[None, :]
    b_dx = gl.convert_layout(b_dx.to(dx.dtype.element_ty), ROWS)
    gl.store(dx + i * (H * K) + j, b_dx, mask=(i < left) & (j >= 0))


@gluon.jit(do_not_specialize=["T", "N", "slots"])
def hopper_gradients_kernel(
    q, k, do, dv, factors, lengths, E, S, dS, pairs, dq, dk, sums, cu_seqlens,
    T, N, slots, q_eighth, k_eighth,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, PACKED: gl.constexpr,
    NORM: gl.constexpr,
):  # fmt: skip
    """One chunk of one key head, and all value heads that share it, two or more, one after the other.

    Writes dq and dk [.., H, K], and sums [2, HV, slots, 2 C + K / 2] as gradients_kernel does with two blocks of K.
    What belongs to a block there is a half here: of y what is from q or from k, of z the columns, of <S, dS'> the rows.
    Strides come divided by 8, so that the compiler knows that the rows which it copies begin at multiples of 16 bytes.
    """
    h = gl.program_id(0) % H
    slot = gl.program_id(0) // H
    token, left = chunk_of_slot(cu_seqlens, slot, T, N, C, PACKED)
    if left <= 0:  # pairs_kernel has seen to that
        return

    R: gl.constexpr = HV // H
    dtype: gl.constexpr = q.dtype.element_ty
    dodv = gl.allocate_shared_memory(dtype, [2 * C, V], SHARED)
    b_E = gl.allocate_shared_memory(dtype, [C, V], SHARED)
    b_S = gl.allocate_shared_memory(dtype, [2, V, K], SHARED)
    b_dS = gl.allocate_shared_memory(dtype, [2, V, K], SHARED)
    b_qk = gl.allocate_shared_memory(dtype, [2 * C, K], SHARED)
    b_FJ = gl.allocate_shared_memory(dtype, [2 * C, C], SHARED)
    unit = (h * R).to(gl.int64) * slots + slot  # of the first value head; the next one's is `slots` further on
    corner = (token * HV + h * R) * V

    copy_rows(b_qk.slice(0, C), q + token * (q_eighth * 8) + h * K, q_eighth * 8, left)
    copy_rows(b_qk.slice(C, C), k + token * (k_eighth * 8) + h * K, k_eighth * 8, left)
    copy_states(b_S.index(0), b_dS.index(0), S, dS, unit, K, V)
    copy_tokens(dodv, b_E, b_FJ, do, dv, E, pairs, unit, corner, left, HV, V, C)
    async_copy.commit_group()
    copy_states(b_S.index(1), b_dS.index(1), S, dS, unit + slots, K, V)
    async_copy.commit_group()

    i, j = gl.arange(0, 2 * C, gl.SliceLayout(1, TALL)), gl.arange(0, C, gl.SliceLayout(1, FLAT))
    block = slots.to(gl.int64) * (HV * (2 * C + K // 2))  # from one half of sums to the other
    dqdk, dk_after = gl.zeros([2 * C, K], gl.float32, TALL), gl.zeros([C, K], gl.float32, FLAT)
    for r in range(R):
        # load
        p_factors, p_sums = factors + unit * (FACTORS * C), sums + unit * (2 * C + K // 2)
        decay = gl.load(p_factors + gl.where(i < C, QUERY * C, READ * C) + i % C)
        decay, write = gl.where(i < C, decay, -decay), gl.load(p_factors + WRITE * C + j)
        async_copy.wait_group(1)  # all but the next head's states
        fence_async_shared()
        barrier()
        # compute
        S_now, dS_now = b_S.index(r % 2), b_dS.index(r % 2)
        FJ = b_FJ.load(gl.DotOperandLayout(0, TALL, 2))
        dqdk = warpgroup_mma(FJ, b_qk.slice(C, C), dqdk, is_async=True)  # (9.7), (9.8)
        dk_after = warpgroup_mma(b_FJ.permute([1, 0]), b_qk, dk_after, is_async=True)  # (9.9)
        e = warpgroup_mma(b_E, dS_now, gl.zeros([C, K], gl.float32, FLAT), use_acc=False, is_async=True)
        ends(S_now, dS_now, p_sums + 2 * C, block, V, K)
        dqdk, dk_after, e, FJ = warpgroup_mma_wait(0, deps=[dqdk, dk_after, e, FJ])
        xa = warpgroup_mma(dodv, S_now, gl.zeros([2 * C, K], gl.float32, TALL), use_acc=False, is_async=True)
        z = gl.sum(gl.reshape(e * b_qk.slice(C, C).load(FLAT).to(gl.float32), [C, 2, K // 2]), 2)
        half, row = gl.arange(0, 2, gl.SliceLayout(0, z.type.layout)), gl.arange(0, C, gl.SliceLayout(1, z.type.layout))
        gl.store(p_sums + half[None, :] * block + 2 * row[:, None] + 1, z)  # (9.13)
        dk_after += e * write[:, None]  # (9.9)
        xa = warpgroup_mma_wait(0, deps=[xa])
        barrier()
        unit += slots
        corner += V
        if r + 1 < R:
            copy_tokens(dodv, b_E, b_FJ, do, dv, E, pairs, unit, corner, left, HV, V, C)
        async_copy.commit_group()
        if r + 2 < R:
            copy_states(S_now, dS_now, S, dS, unit + slots, K, V)
        async_copy.commit_group()
        y = decay * gl.sum(xa * b_qk.load(TALL).to(gl.float32), 1)
        gl.store(p_sums + 2 * (i % C) + gl.where(i < C, 0, block), y)  # (9.13)
        dqdk += xa * decay[:, None]  # (9.7), (9.8)

    barrier()
    b_dqdk = gl.allocate_shared_memory(gl.float32, [2 * C, K], SHARED_SUMS)  # where the tiles were
    b_dqdk.store(dqdk)
    barrier()
    p_lengths = lengths + (h.to(gl.int64) * slots + slot) * (2 * C)
    corner = (token * H + h) * K
    store_gradient(dq + corner, b_dqdk.slice(0, C).load(FLAT), b_qk.slice(0, C), p_lengths, left, H, C, K, NORM)
    b_dk = b_dqdk.slice(C, C).load(FLAT) + dk_after
    store_gradient(dk + corner, b_dk, b_qk.slice(C, C), p_lengths + C, left, H, C, K, NORM)
